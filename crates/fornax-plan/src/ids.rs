//! Newtypes for the indices that cross the boundary. They know nothing of what they index.

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[repr(transparent)]
        pub struct $name(pub u32);

        impl $name {
            /// The id as an index into the vector it belongs to.
            #[inline]
            pub fn ix(self) -> usize {
                self.0 as usize
            }
        }
    };
}

id!(
    /// A value of a plan: an activation matrix written by exactly one op.
    ValueId
);
id!(
    /// A weight of a plan, an index into [`crate::Plan::weights`].
    WeightId
);
id!(
    /// A rotary table of a plan, an index into [`crate::Plan::ropes`].
    RopeId
);
id!(
    /// A per-sequence state of a plan, an index into [`crate::Plan::states`].
    StateId
);
id!(
    /// A row of the device's per-sequence storage: last token, history, fixed-size states.
    SlotId
);
id!(
    /// A physical KV block of one group's pool.
    BlockId
);

/// A token of the model's vocabulary.
pub type TokenId = u32;
