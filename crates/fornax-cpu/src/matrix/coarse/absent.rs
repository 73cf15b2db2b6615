//! Coarse products where no tier has kernels for them: nothing of these types exists, so whoever has one never runs.
//! The real ones are beside it, in `mod.rs`.

use std::convert::Infallible;
use std::ops::Range;

use fornax_plan::Result;

use super::{Arena, Matrix};
use crate::isa::Isa;

/// Columns that share a scale.
pub(crate) const SPAN: usize = 256;
/// Rows of activations of one call, at most.
pub(crate) const ROWS: usize = 128;

/// The routines of a tier.
pub(crate) struct CoarseKernels(Infallible);
/// A matrix.
pub(crate) struct CoarseMatrix(Infallible);
/// Room for rows.
#[derive(Debug)]
pub(crate) struct CoarseRows(Infallible);
/// Rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CoarseView(Infallible);

impl Isa {
    /// None.
    pub(crate) fn coarse(self) -> Option<&'static CoarseKernels> {
        None
    }
}

impl CoarseMatrix {
    pub(crate) fn fits(_: &Matrix) -> bool {
        false
    }

    pub(crate) fn place(_: &Matrix, _: &mut Arena) -> CoarseMatrix {
        unreachable!("nothing fits")
    }

    pub(crate) fn rows(&self) -> usize {
        match self.0 {}
    }

    pub(crate) fn bytes(&self) -> usize {
        match self.0 {}
    }

    pub(crate) unsafe fn multiply(
        &self,
        kernels: &CoarseKernels,
        _: CoarseView,
        _: Range<usize>,
        _: Range<usize>,
        _: *mut f32,
        _: usize,
    ) {
        match kernels.0 {}
    }
}

impl CoarseRows {
    pub(crate) fn new(_: usize, _: usize) -> Result<CoarseRows> {
        unreachable!("there are no kernels for them")
    }

    pub(crate) fn shaped(&self, _: usize, _: usize) -> CoarseView {
        match self.0 {}
    }

    pub(crate) fn bytes(&self) -> usize {
        match self.0 {}
    }
}

impl CoarseView {
    pub(crate) fn rows(&self) -> usize {
        match self.0 {}
    }

    pub(crate) unsafe fn fill(&self, kernels: &CoarseKernels, _: usize, _: &[f32], _: usize) {
        match kernels.0 {}
    }
}

pub(crate) fn fill(_: &[(&CoarseMatrix, &Matrix)], kernels: &CoarseKernels, _: usize) {
    match kernels.0 {}
}

pub(crate) fn arena(_: &[&Matrix]) -> Result<Arena> {
    unreachable!("there are no kernels for them")
}
