//! The choice of tokens as launches: the best of every row that asks for no more, then, where some sequence does, penalties
//! and the draw. It knows no parameter.

use fornax_plan::{Result, ValueId};

use super::{Action, Builder, Extent, Grid, Place};
use crate::args::families::{DrawArgs, NoteArgs, PenaltyArgs, PickArgs, SurveyArgs};
use crate::feed::{DRAWN, PENALISED, TOKEN};

/// Words that the kernels keep of a part of a row: see sample.cu.
const RECORD: u32 = 3 + 128;
/// Logits of a part of a row.
const PART: u32 = 4096;

impl Builder<'_> {
    pub(super) fn choice(&mut self, at: u32, logits: ValueId) -> Result<()> {
        let (first, next) = self.shape.out_counts();
        let [out_first, out_next] = [first, next].map(|n| n as u32);
        let vocab = self.plan.width(logits);
        let from = self.value(logits);
        let Place::At(copied) = from else { return Ok(()) };
        self.out.actions.push(Action::CopyLogits { from: copied });
        let rows = self.words(self.shape.all_rows());
        let ends = [
            Place::At(self.out.last),
            self.words(self.shape.stops()),
            Place::At(self.out.stop.ptr),
            Place::At(self.out.out.ptr),
        ];
        let parts = vocab.div_ceil(PART).clamp(1, 64);
        let stride = self.shape.remembered as u32;
        let best = self.scratch("parts of a choice", Extent::Wanted, 4 * parts)?;
        let changed = self.scratch("parts after penalties", Extent::Wanted, 4 * parts)?;
        let near = self.scratch("candidates", Extent::Wanted, RECORD * parts)?;
        let drawn = self.scratch("drawn tokens", Extent::Wanted, 1)?;
        let (history, draws) = (Place::At(self.out.history), self.words(self.shape.draws()));

        let wide = (Grid::ByRow(parts), 256);
        let survey = |kinds| SurveyArgs { rows: 0, base: 0, vocab, parts, kinds }.words();
        let surveyed = |to| vec![from, Place::Wanted, rows, to];
        let picked = |kinds| {
            PickArgs { rows: 0, base: 0, vocab, parts, stride, out_first, out_next, kinds }.words()
        };
        let picks = [from, best, changed, drawn, Place::Wanted, rows, history, draws];
        let picks = [&picks[..], &ends].concat();
        // Always, for those that want the best.
        self.sample(at, "survey", wide, survey(TOKEN), surveyed(best), 0)?;
        self.sample(at, "pick", (Grid::Rows, 32), picked(TOKEN), picks.clone(), 0)?;

        let constants = NoteArgs { rows: 0, stride }.words();
        let places = vec![Place::Rows, ends[0], history];
        self.sample(at, "note_tokens", (Grid::Spread(128), 128), constants, places, PENALISED)?;
        if let Some(Action::Launch { extent, base_at, .. }) = self.out.actions.last_mut() {
            (*extent, *base_at) = (Extent::Rows, None);
        }
        let ways = DRAWN | PENALISED;
        self.sample(at, "survey", wide, survey(ways), surveyed(best), ways)?;
        let constants = PenaltyArgs { rows: 0, base: 0, vocab, stride }.words();
        let penalties = vec![from, Place::Wanted, rows, history, draws];
        self.sample(at, "penalise", (Grid::Rows, 256), constants, penalties, PENALISED)?;
        self.sample(at, "survey", wide, survey(PENALISED), surveyed(changed), PENALISED)?;
        let constants = DrawArgs { rows: 0, base: 0, vocab, parts }.words();
        let mut places = vec![from, best, changed, Place::Wanted, rows, draws, near];
        self.sample(at, "gather", wide, constants.clone(), places.clone(), DRAWN)?;
        places.push(drawn);
        self.sample(at, "draw_token", (Grid::Rows, 1024), constants, places, DRAWN)?;
        self.sample(at, "pick", (Grid::Rows, 32), picked(ways), picks, ways)
    }

    fn sample(
        &mut self,
        at: u32,
        name: &str,
        (grid, threads): (Grid, u32),
        constants: Vec<u32>,
        places: Vec<Place>,
        ways: u32,
    ) -> Result<()> {
        let shape = (grid, threads, Extent::Wanted);
        self.push(at, ("sample", name), shape, constants, places)?;
        self.by((ways, Some(1)));
        Ok(())
    }

    /// Has the last launch wait for these ways of choosing, and say where the round's rows begin.
    fn by(&mut self, (when, base): (u32, Option<usize>)) {
        if let Some(Action::Launch { base_at, ways, .. }) = self.out.actions.last_mut() {
            (*base_at, *ways) = (base, when);
        }
    }
}
