//! The constant arguments of mixtures, short convolutions, conversions and draws. It knows no buffer.

use super::Words;

args! {
    /// `moe_route`.
    RouteArgs { rows: u32, experts: u32, top_k: u32, normalise: u32, }
    /// `moe_product_*`; `each` picks read one row.
    ExpertArgs { rows: u32, cols: u32, outs: u32, experts: u32, each: u32, }
    /// `moe_act`; `act` as for gated layers.
    MoeActArgs {
        rows: u32,
        outs: u32,
        experts: u32,
        bias: u32,
        act: u32,
        alpha: f32,
        limit: f32,
    }
    /// `moe_sum`.
    MoeSumArgs { rows: u32, outs: u32, top_k: u32, experts: u32, bias: u32, residual: u32, }
    /// `short_conv`.
    ConvArgs { rows: u32, width: u32, taps: u32, tile: u32, }
    /// `round_rows` of the plain kernels.
    RoundedArgs { rows: u32, width: u32, }
    /// `note_tokens`; `stride` positions of every slot.
    NoteArgs { rows: u32, stride: u32, }
    /// `survey`; `kinds` of the wanted rows that are looked at.
    SurveyArgs { rows: u32, base: u32, vocab: u32, parts: u32, kinds: u32, }
    /// `penalise`.
    PenaltyArgs { rows: u32, base: u32, vocab: u32, stride: u32, }
    /// `gather`, `draw_token`.
    DrawArgs { rows: u32, base: u32, vocab: u32, parts: u32, }
    /// `pick`: `kinds` of the wanted rows that are chosen for; `base` is where this round's rows begin among all rows,
    /// `out_first` and `out_next` are the outputs of the first round and of each later one.
    PickArgs {
        rows: u32,
        base: u32,
        vocab: u32,
        parts: u32,
        stride: u32,
        out_first: u32,
        out_next: u32,
        kinds: u32,
    }
}
