//! Instruction tiers: which sets of vector instructions the kernels are written for, and which of
//! them this processor has. It knows no kernel.
//!
//! Every tier of the host architecture is always compiled; which one runs is decided once, at run
//! time. Results never depend on the tier.

use std::fmt;

/// A set of instructions that kernels are written for, slowest first within an architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// Plain Rust, on every machine.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ, VL and VNNI.
    Avx512Vnni,
    /// The same with AMX tiles of 8-bit integers for many rows at once.
    Amx,
    /// 64-bit Arm as it comes.
    Neon,
    /// 64-bit Arm with the dot-product instructions.
    NeonDotprod,
    /// 64-bit Arm with the 8-bit matrix instructions besides.
    NeonI8mm,
}

impl Isa {
    /// Every tier, of whatever architecture.
    pub const ALL: &'static [Isa] = &[
        Isa::Scalar,
        Isa::Avx2,
        Isa::Avx512Vnni,
        Isa::Amx,
        Isa::Neon,
        Isa::NeonDotprod,
        Isa::NeonI8mm,
    ];

    /// The name that flags and reports use.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512Vnni => "avx512vnni",
            Isa::Amx => "amx",
            Isa::Neon => "neon",
            Isa::NeonDotprod => "neon_dotprod",
            Isa::NeonI8mm => "neon_i8mm",
        }
    }

    /// The tier called `name`, whether this machine has it or not.
    pub fn parse(name: &str) -> Option<Isa> {
        Isa::ALL.iter().copied().find(|isa| isa.name() == name)
    }

    /// Whether this processor runs the tier.
    pub fn is_available(self) -> bool {
        match self {
            Isa::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => {
                Isa::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
            }
            // Asked of the system and tried out, once.
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => Isa::Avx512Vnni.is_available() && crate::matrix::amx::works(),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDotprod => {
                Isa::Neon.is_available() && std::arch::is_aarch64_feature_detected!("dotprod")
            }
            #[cfg(target_arch = "aarch64")]
            Isa::NeonI8mm => {
                Isa::NeonDotprod.is_available() && std::arch::is_aarch64_feature_detected!("i8mm")
            }
            #[allow(
                unreachable_patterns,
                reason = "which arms are left depends on the architecture"
            )]
            _ => false,
        }
    }

    /// The tiers that this processor runs, slowest first.
    pub fn available() -> Vec<Isa> {
        Isa::ALL.iter().copied().filter(|isa| isa.is_available()).collect()
    }

    /// The fastest tier of this processor.
    pub fn best() -> Isa {
        Isa::ALL.iter().copied().rev().find(|isa| isa.is_available()).unwrap_or(Isa::Scalar)
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back_to_their_tiers() {
        for &isa in Isa::ALL {
            assert_eq!(Isa::parse(isa.name()), Some(isa));
        }
        assert_eq!(Isa::parse("AVX2"), None);
    }

    #[test]
    fn the_best_tier_is_the_last_that_is_available() {
        let available = Isa::available();
        assert_eq!(available[0], Isa::Scalar);
        assert_eq!(available.last(), Some(&Isa::best()));
    }
}
