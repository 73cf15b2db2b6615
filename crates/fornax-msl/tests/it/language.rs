//! Each fault, seeded.
