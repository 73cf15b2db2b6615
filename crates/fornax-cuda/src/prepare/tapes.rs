//! Decoding of one sequence from tapes: asked of the plan, made, or the reason told why not. It knows no kernel.

use fornax_plan::{Op, Result};

use super::Builder;
use crate::fast::decode::Parts;
use crate::fast::drive::{Drive, Way};
use crate::fast::planes;
use crate::fast::tape::{self, Tape};
use crate::fast::{Addresses, Wire};

impl Builder<'_> {
    /// Tapes, where they are wanted and can be had.
    pub(super) fn tape(
        &self,
        parts: &Parts<'_>,
        drive: Drive,
        wire: &Wire,
        planes: &mut planes::Planes,
    ) -> Result<Option<Tape>> {
        if !drive.wants(Way::Tape) {
            return Ok(None);
        }
        let fitted = match &wire.lacks {
            None => tape::fit::fit(self.plan, &self.folded.norms, &wire.stages),
            Some(what) => Err(what.clone()),
        };
        let fitted = fitted.and_then(|(fit, layers)| {
            let unseen = fit.unseen(self.plan, &wire.stages);
            match unseen.filter(|_| drive == Drive::Either) {
                Some(what) => Err(format!("{what} was not seen to run on a GPU yet")),
                None => Ok((fit, layers)),
            }
        });
        let made = match fitted {
            Ok((fit, layers)) => {
                let logits = self.plan.ops.iter().find_map(|op| match op {
                    Op::Logits { out, .. } => Some(self.places.value(*out)),
                    _ => None,
                });
                let source = tape::Source {
                    layers: &layers,
                    stages: &wire.stages,
                    final_norm: self.places.vector(fit.final_norm),
                    logits: logits.unwrap_or(0),
                    fit,
                };
                Tape::new(parts, &source, planes)?
            }
            Err(why) => Err(why),
        };
        match made {
            Ok(tape) => Ok(Some(tape)),
            Err(why) => {
                tracing::info!("cuda: single sequences are not decoded from tapes: {why}");
                drive.checked(Way::Tape, None, &why)
            }
        }
    }
}
