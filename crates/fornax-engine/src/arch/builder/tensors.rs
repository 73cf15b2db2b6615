//! Tensors by name, with their shapes checked. It knows no op.

use fornax_gguf::TensorInfo;
use fornax_plan::{Linear, WeightId, WeightRef};

use super::Builder;
use crate::error::{Error, Result};

impl Builder<'_> {
    pub(super) fn tensor_name(&self, name: &str) -> String {
        match self.layer {
            Some(l) => format!("blk.{l}.{name}"),
            None => name.to_string(),
        }
    }

    /// Whether the current layer (or the file, outside layers) has this tensor.
    pub(in crate::arch) fn has(&self, name: &str) -> bool {
        self.gguf.tensor(&self.tensor_name(name)).is_some()
    }

    pub(super) fn weight_ref(
        &self,
        t: &TensorInfo,
        rows: u32,
        cols: u32,
        experts: u32,
    ) -> Result<WeightRef> {
        let d = |i: usize| t.dims.get(i).copied().unwrap_or(1);
        let found = (d(0), d(1), d(2));
        let want = (u64::from(cols), u64::from(rows), u64::from(experts));
        if found != want || t.dims.get(3).is_some_and(|d| *d != 1) {
            return Err(Error::malformed(format!(
                "loading the model: tensor {} has shape {:?}, expected [{cols}, {rows}, {experts}]",
                t.name, t.dims
            )));
        }
        if !(cols as usize).is_multiple_of(t.ty.block_len()) {
            return Err(Error::malformed(format!(
                "loading the model: tensor {} of type {} has rows of {cols} elements, no multiple of {}",
                t.name,
                t.ty.name(),
                t.ty.block_len()
            )));
        }
        Ok(WeightRef {
            name: t.name.clone(),
            ty: t.ty,
            cols,
            rows,
            experts,
            data: self.gguf.mapping(t).clone(),
            offset: usize::try_from(t.offset)
                .map_err(|_| Error::malformed(format!("tensor {}: offset {}", t.name, t.offset)))?,
        })
    }

    /// A tensor of the current layer as `experts` matrices of rows × cols; the same tensor asked
    /// for twice is one weight.
    pub(in crate::arch) fn weight(
        &mut self,
        name: &str,
        rows: u32,
        cols: u32,
        experts: u32,
    ) -> Result<WeightId> {
        let name = self.tensor_name(name);
        if let Some(id) = self.weights.get(&name) {
            return Ok(*id);
        }
        let tensor = self.gguf.tensor(&name).ok_or_else(|| {
            Error::malformed(format!("loading the model: tensor {name} is missing"))
        })?;
        let weight = self.weight_ref(tensor, rows, cols, experts)?;
        let id = self.plan.weight(weight);
        self.weights.insert(name, id);
        Ok(id)
    }

    /// A vector of f32, `{name}.weight`.
    pub(in crate::arch) fn vector(&mut self, name: &str, len: u32) -> Result<WeightId> {
        self.weight(&format!("{name}.weight"), 1, len, 1)
    }

    /// `{name}.weight` with `{name}.bias` where the file has one.
    pub(in crate::arch) fn linear(&mut self, name: &str, rows: u32, cols: u32) -> Result<Linear> {
        self.expert_linear(name, rows, cols, 1)
    }

    /// As [`Builder::linear`], for a stack of experts.
    pub(in crate::arch) fn expert_linear(
        &mut self,
        name: &str,
        rows: u32,
        cols: u32,
        experts: u32,
    ) -> Result<Linear> {
        let weight = self.weight(&format!("{name}.weight"), rows, cols, experts)?;
        let bias = format!("{name}.bias");
        let bias = if self.has(&bias) {
            let (r, c) = if experts > 1 { (experts, rows) } else { (1, rows) };
            Some(self.weight(&bias, r, c, 1)?)
        } else {
            None
        };
        Ok(Linear { weight, bias })
    }
}
