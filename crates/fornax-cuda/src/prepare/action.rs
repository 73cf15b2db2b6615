//! One step of a round as it is kept: a launch with its constants and places, or a copy. It knows no op.

use crate::driver::Function;

/// Rows of a tile.
const TILE: u32 = 8;

/// An argument: memory of the program, or this round's part of the step's words.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place {
    At(u64),
    /// This round's rows.
    Rows,
    /// This round's wanted rows.
    Wanted,
}

/// Which rows an action runs over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    Rows,
    Wanted,
}

/// Blocks of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Grid {
    /// One for each row.
    Rows,
    /// So many, times one for each row.
    ByRow(u32),
    /// So many, times one for each tile of rows.
    ByTile(u32),
    /// So many, times so many for each row.
    ByPick(u32, u32),
    /// So many in all.
    Spread(u32),
}

impl Grid {
    pub(crate) fn of(self, rows: u32) -> (u32, u32) {
        match self {
            Grid::Rows => (rows, 1),
            Grid::ByRow(x) => (x, rows),
            Grid::ByTile(x) => (x, rows.div_ceil(TILE)),
            Grid::ByPick(x, n) => (x, n * rows),
            Grid::Spread(n) => (rows.div_ceil(n), 1),
        }
    }
}

/// One step of a round.
#[derive(Clone, Debug)]
pub(crate) enum Action {
    Launch {
        op: u32,
        function: Function,
        grid: Grid,
        threads: u32,
        extent: Extent,
        /// The first word is the number of rows.
        constants: Vec<u32>,
        /// A word for where this round's rows begin among all rows.
        base_at: Option<usize>,
        places: Vec<Place>,
        /// Only where some sequence's tokens are chosen in one of these ways; always where 0.
        ways: u32,
    },
    /// A product of any number of rows, by the stage at this address.
    Stage { op: u32, at: u64, extent: Extent },
    /// The embedding out of planes.
    EmbedRows { op: u32, constants: Vec<u32>, places: Vec<Place> },
    /// The host's copy of the logits, where it wants them.
    CopyLogits { from: u64 },
    /// The host's copy of the hidden rows.
    CopyHidden { from: u64 },
}
