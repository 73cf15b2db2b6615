//! The choice of a token as dispatches: the best of each part of a row, penalties and the draw
//! where a sequence asks for them, and the row that feeds the token back. It knows no parameter.

use fornax_plan::{Result, ValueId};

use super::Builder;
use super::lower::{ONE, ROWS, whole};
use crate::args::{DrawArgs, PartsArgs, PenaltyArgs, PickArgs};
use crate::encode::{Axis, Extent, Place};
use crate::feed::{DRAWN, PENALISED};
use crate::hazard::Access::{Read, Write};
use crate::policy;

/// Words that the kernels keep of a part of a row: see sample.metal.
const RECORD: u32 = 2 + 128;

impl Builder<'_> {
    pub(super) fn lower_choice(&mut self, at: u32, logits: ValueId) -> Result<()> {
        let vocab = self.plan.width(logits);
        let parts = policy::argmax_parts(vocab);
        let stride = self.shape.remembered as u32;
        let mut stage = |name, words: u32| -> Result<Place> {
            let buffer = self.stage(name, self.wanted_max * words as usize)?;
            Ok(Place::Value(buffer, words as usize))
        };
        let best = stage("parts of a choice", 4 * parts)?;
        let changed = stage("parts after penalties", 4 * parts)?;
        let near = stage("candidates", RECORD * parts)?;
        let drawn = stage("drawn tokens", 1)?;
        let places = |list: &[&Place]| -> Vec<super::Arg> {
            list.iter().map(|p| Some(((*p).clone(), Read))).collect()
        };
        let (wanted, rows, draws) = (Place::Wanted, Place::AllRows, Place::Draws);
        let history = Place::Fixed(self.history.all());

        self.lower_parts(at, logits, (&best, parts), Extent::Wanted)?;
        let mut args = vec![self.value(logits, Write)];
        args.extend(places(&[&wanted, &rows, &history, &draws]));
        let constants = PenaltyArgs { rows: 0, base: 0, vocab, stride }.words();
        let e = whole("penalise", [ROWS, ONE, ONE], 256);
        self.dispatch(at, e, Extent::Ways(PENALISED), (args, constants))?;
        self.based();
        self.lower_parts(at, logits, (&changed, parts), Extent::Ways(PENALISED))?;

        let mut common = vec![self.value(logits, Read)];
        common.extend(places(&[&best, &changed, &wanted, &rows, &draws]));
        let constants = DrawArgs { rows: 0, base: 0, vocab, parts }.words();
        let mut args = common.clone();
        args.push(Some((near.clone(), Write)));
        let e = whole("gather", [Axis::Fixed(parts), ROWS, ONE], 256);
        self.dispatch(at, e, Extent::Ways(DRAWN), (args, constants.clone()))?;
        self.based();
        common.extend([Some((near, Read)), Some((drawn.clone(), Write))]);
        let e = whole("draw_token", [ROWS, ONE, ONE], 256);
        self.dispatch(at, e, Extent::Ways(DRAWN), (common, constants))?;
        self.based();

        let mut args = self.choice_args(Some((best, Read)));
        args.extend(places(&[&changed, &drawn]));
        args.push(self.value(logits, Read));
        args.extend(places(&[&history, &draws]));
        let (first, next) = self.shape.out_counts();
        let [out_first, out_next, choices] = [first, next, self.shape.choices()].map(|n| n as u32);
        let constants =
            PickArgs { rows: 0, base: 0, out_first, out_next, choices, parts, vocab, stride };
        let e = whole("argmax_pick", [ROWS, ONE, ONE], 32);
        self.dispatch(at, e, Extent::Wanted, (args, constants.words()))?;
        self.based();
        Ok(())
    }

    /// The best of each part of every wanted row.
    fn lower_parts(
        &mut self,
        at: u32,
        logits: ValueId,
        (to, parts): (&Place, u32),
        extent: Extent,
    ) -> Result<()> {
        let args = vec![self.value(logits, Read), Some((to.clone(), Write))];
        let constants = PartsArgs { rows: 0, vocab: self.plan.width(logits), parts }.words();
        let e = whole("argmax_parts", [Axis::Fixed(parts), ROWS, ONE], 256);
        self.dispatch(at, e, extent, (args, constants))
    }

    /// Has the last command's second constant say where the round's rows begin.
    fn based(&mut self) {
        if let Some(command) = self.out.commands.last_mut() {
            command.base_at = Some(1);
        }
    }
}
