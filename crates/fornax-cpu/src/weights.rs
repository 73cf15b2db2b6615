//! The weights of a plan as this device keeps them: packed in the order of use, and a second time where long prompts have
//! a form of their own. It knows the plan and runs nothing.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use fornax_gguf::TensorType;
use fornax_plan::{Op, Plan, Result, RowSpace, WeightId, WeightRef};

use crate::matrix::coarse::{self, CoarseKernels, CoarseMatrix};
use crate::matrix::{Arena, Matrix, Share, fill, give_back};
use crate::stages::space;

/// The weights of a plan as this device keeps them.
pub(crate) struct Weights {
    pub(crate) matrices: HashMap<Key, Arc<Matrix>>,
    pub(crate) vectors: HashMap<WeightId, Arc<[f32]>>,
    pub(crate) coarse: HashMap<Key, Arc<CoarseMatrix>>,
    /// Where the matrices are.
    pub(crate) arena: Share,
}

/// The map's address, offset, type and shape: two weights with the same key are the same bytes (a
/// tied embedding). The plan keeps the maps alive.
pub(crate) type Key = (usize, usize, TensorType, u32, u32, u32);

pub(crate) fn key(w: &WeightRef) -> Key {
    (Arc::as_ptr(&w.data).addr(), w.offset, w.ty, w.experts, w.rows, w.cols)
}

impl Weights {
    /// Packs every matrix of the plan, in the order of use; the map's pages of what is copied go
    /// as it is read.
    pub(crate) fn pack(plan: &Plan, threads: usize) -> Result<Weights> {
        let mut order: Vec<&WeightRef> = Vec::new();
        let mut known = HashSet::new();
        for op in &plan.ops {
            let weights = op.linears();
            let weights = weights.iter().map(|l| &plan.weights[l.weight.ix()]);
            order.extend(weights.filter(|w| known.insert(key(w))));
        }
        let mut room = 0usize;
        for w in &order {
            room = room.saturating_add(Matrix::room(w)?);
        }
        // What reading the file's tables left behind goes before the weights come.
        give_back();
        plan.weights.iter().for_each(|w| w.data.release(0..w.data.len()));
        let mut arena = Arena::new(room, "the weights")?;
        let place = |w| Ok(Arc::new(Matrix::place(w, &mut arena)?));
        let matrices = order.iter().copied().map(place).collect::<Result<Vec<_>>>()?;
        fill(&matrices.iter().map(|m| &**m).collect::<Vec<_>>(), threads);
        let matrices = order.iter().map(|w| key(w)).zip(matrices).collect();
        let (vectors, coarse) = (HashMap::new(), HashMap::new());
        Ok(Weights { matrices, vectors, coarse, arena: arena.taken() })
    }

    /// Makes the coarse form of every matrix that rows of prompts are multiplied with, where all of its op have one.
    pub(crate) fn coarsen(
        &mut self,
        plan: &Plan,
        kernels: &CoarseKernels,
        threads: usize,
    ) -> Result<()> {
        let mut order: Vec<(Key, &Matrix)> = Vec::new();
        let mut known = HashSet::new();
        for op in &plan.ops {
            let product = matches!(op, Op::MatMul { .. } | Op::Qkv { .. } | Op::GatedMlp { .. });
            let linears = op.linears();
            let keys = linears.iter().map(|l| key(&plan.weights[l.weight.ix()]));
            let these: Vec<_> = keys.map(|k| (k, &*self.matrices[&k])).collect();
            let fit = these.iter().all(|(_, m)| CoarseMatrix::fits(m));
            if product && fit && space(plan, op) == RowSpace::Tokens {
                order.extend(these.into_iter().filter(|(k, _)| known.insert(*k)));
            }
        }
        let mut arena = coarse::arena(&order.iter().map(|(_, m)| *m).collect::<Vec<_>>())?;
        let place = |(_, m): &(Key, &Matrix)| Arc::new(CoarseMatrix::place(m, &mut arena));
        let forms: Vec<_> = order.iter().map(place).collect();
        let pairs = forms.iter().zip(&order).map(|(form, (_, exact))| (&**form, *exact));
        coarse::fill(&pairs.collect::<Vec<_>>(), kernels, threads);
        self.coarse = order.iter().map(|(k, _)| *k).zip(forms).collect();
        Ok(())
    }

    pub(crate) fn bytes(&self) -> u64 {
        let matrices: usize = self.matrices.values().map(|m| m.bytes()).sum();
        let vectors: usize = self.vectors.values().map(|v| 4 * v.len()).sum();
        let coarse: usize = self.coarse.values().map(|m| m.bytes()).sum();
        (matrices + vectors + coarse) as u64
    }
}
