//! KV blocks longer than the kernels' own: each is a run of theirs, side by side in the pool, and tables are spelled out
//! before they reach the program. It knows the boundary alone.

use fornax_plan::{
    BlockId, Cmd, MemoryUse, OpTime, Program, Progress, Result, SeqStep, SlotId, StepOutput, Ticket,
};

/// A program whose blocks are `run` blocks of the one inside. For comparisons: it allocates in every step.
pub(crate) struct LongBlocks<P> {
    pub(crate) program: P,
    pub(crate) run: u32,
}

impl<P: Program> LongBlocks<P> {
    /// The blocks that a block is made of. An id past the end stays past the end.
    fn spell(&self, block: BlockId) -> impl Iterator<Item = BlockId> + use<P> {
        let first = block.0.saturating_mul(self.run);
        (0..self.run).map(move |i| BlockId(first.saturating_add(i)))
    }

    fn table(&self, table: &[BlockId]) -> Vec<BlockId> {
        table.iter().flat_map(|b| self.spell(*b)).collect()
    }

    /// Hands `f` the step in the blocks of the program inside.
    fn step<T>(
        &mut self,
        step: &[SeqStep<'_>],
        f: impl FnOnce(&mut P, &[SeqStep<'_>]) -> Result<T>,
    ) -> Result<T> {
        let tables: Vec<Vec<Vec<BlockId>>> =
            step.iter().map(|s| s.tables.iter().map(|t| self.table(t)).collect()).collect();
        let tables: Vec<Vec<&[BlockId]>> =
            tables.iter().map(|s| s.iter().map(Vec::as_slice).collect()).collect();
        let step: Vec<SeqStep<'_>> =
            step.iter().zip(&tables).map(|(s, tables)| SeqStep { tables, ..s.clone() }).collect();
        f(&mut self.program, &step)
    }
}

impl<P: Program> Program for LongBlocks<P> {
    fn submit(&mut self, step: &[SeqStep<'_>]) -> Result<Ticket> {
        self.step(step, |program, step| program.submit(step))
    }

    fn poll(&mut self, ticket: &Ticket, out: &mut StepOutput) -> Result<Progress> {
        self.program.poll(ticket, out)
    }

    fn wait(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<()> {
        self.program.wait(ticket, out)
    }

    fn stop(&mut self, slot: SlotId) {
        self.program.stop(slot);
    }

    fn command(&mut self, command: Cmd<'_>) -> Result<()> {
        match command {
            Cmd::CopyBlock { group, from, to } => {
                let mut pairs = self.spell(from).zip(self.spell(to));
                pairs.try_for_each(|(from, to)| {
                    self.program.command(Cmd::CopyBlock { group, from, to })
                })
            }
            Cmd::ReadKv { group, table, tokens, out } => {
                let table = &self.table(table);
                self.program.command(Cmd::ReadKv { group, table, tokens, out })
            }
            Cmd::WriteKv { group, table, tokens, data } => {
                let table = &self.table(table);
                self.program.command(Cmd::WriteKv { group, table, tokens, data })
            }
            state @ (Cmd::ReadState { .. } | Cmd::WriteState { .. }) => self.program.command(state),
        }
    }

    fn memory(&self) -> MemoryUse {
        self.program.memory()
    }

    fn grow_kv(&mut self, blocks: u32) -> Result<()> {
        self.program.grow_kv(blocks.saturating_mul(self.run))
    }

    fn profile(&mut self, step: &[SeqStep<'_>], out: &mut StepOutput) -> Result<Vec<OpTime>> {
        self.step(step, |program, step| program.profile(step, out))
    }
}
