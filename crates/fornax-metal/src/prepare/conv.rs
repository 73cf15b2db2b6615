//! The short convolution as a dispatch, and the states that it keeps. It knows no cache.

use fornax_plan::{Result, StateId, ValueId, WeightId};

use super::Builder;
use super::lower::{elements, whole};
use crate::args::ConvArgs;
use crate::encode::{Extent, Place};
use crate::hazard::Access::{Read, Write};

/// Rows of a sequence that one thread takes, where the taps are no more.
const TILE: u32 = 8;

impl Builder<'_> {
    pub(super) fn lower_conv(
        &mut self,
        at: u32,
        x: ValueId,
        kernel: WeightId,
        state: StateId,
        out: ValueId,
    ) -> Result<()> {
        let (width, taps) = (self.plan.width(out), self.plan.weights[kernel.ix()].cols);
        let args = vec![
            self.value(x, Read),
            self.weight(kernel),
            Some((Place::Rows, Read)),
            Some((Place::Fixed(self.out.states[state.ix()].all()), Write)),
            self.value(out, Write),
        ];
        let constants = ConvArgs { rows: 0, width, taps, tile: TILE.max(taps) }.words();
        let e = whole("short_conv", elements(width), 256);
        self.dispatch(at, e, Extent::Rows, (args, constants))
    }
}
