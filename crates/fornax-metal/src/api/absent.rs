//! Stands where the system's Metal would be, on systems that have none: nothing of it can exist.

use std::convert::Infallible;
use std::sync::Arc;

use fornax_gguf::Mapping;
use fornax_plan::{Error, Result};

use super::failure::Failure;
use super::memory::Memory;
use super::recording::{Ran, Recording};
use crate::policy::Family;

/// No device.
#[derive(Debug)]
pub(crate) struct Gpu(Infallible);

/// No queue.
#[derive(Clone, Debug)]
pub(crate) struct Queue(Infallible);

/// No commands on their way.
#[derive(Debug)]
pub(crate) struct Flight(Infallible);

/// No memory.
#[derive(Clone, Debug)]
pub(crate) struct Buffer(Infallible);

/// No kernel.
#[derive(Clone, Debug)]
pub(crate) struct Pipeline(Infallible);

impl Gpu {
    pub(crate) fn open() -> Result<Arc<Gpu>> {
        Err(Error::unsupported("metal: only macOS has it; use --device cpu"))
    }

    pub(crate) fn name(&self) -> &str {
        match self.0 {}
    }

    pub(crate) fn family(&self) -> Family {
        match self.0 {}
    }

    pub(crate) fn free(&self) -> u64 {
        match self.0 {}
    }

    pub(crate) fn report(&self) -> Vec<(String, String)> {
        match self.0 {}
    }

    pub(super) fn queue(&self) -> Result<Queue> {
        match self.0 {}
    }

    pub(super) fn buffer(&self, _: &str, _: usize) -> Result<Buffer> {
        match self.0 {}
    }

    pub(super) fn wrap(
        &self,
        _: &mut Vec<(Arc<Mapping>, usize, Buffer)>,
        _: &Arc<Mapping>,
        _: usize,
        _: usize,
    ) -> Result<(Buffer, usize)> {
        match self.0 {}
    }

    pub(super) fn pipeline(&self, _: &str, _: &[u32], _: Option<u32>) -> Result<Pipeline> {
        match self.0 {}
    }
}

impl Pipeline {
    pub(super) fn threads_max(&self) -> u32 {
        match self.0 {}
    }
}

impl Buffer {
    pub(super) fn write(&self, _: usize, _: &[u32]) {
        match self.0 {}
    }

    pub(super) fn read(&self, _: usize, _: &mut [u32]) {
        match self.0 {}
    }
}

impl Queue {
    pub(super) fn commit(
        &self,
        _: &Memory,
        _: &Recording,
        _: f64,
    ) -> std::result::Result<Flight, Failure> {
        match self.0 {}
    }

    pub(super) fn run_each(
        &self,
        _: &Memory,
        _: &Recording,
        _: &mut [f64],
        _: &mut Vec<Ran>,
    ) -> std::result::Result<f64, Failure> {
        match self.0 {}
    }
}

impl Flight {
    pub(super) fn plain_s(&self) -> f64 {
        match self.0 {}
    }

    pub(super) fn is_over(&self) -> bool {
        match self.0 {}
    }

    pub(super) fn wait(self) -> std::result::Result<f64, Failure> {
        match self.0 {}
    }
}
