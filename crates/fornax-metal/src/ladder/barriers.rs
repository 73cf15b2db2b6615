//! Every barrier in every kernel: without it, some test sees a fault.

use std::panic::{UnwindSafe, catch_unwind};

use fornax_msl::BarrierId;

use super::{WITHOUT, any, attention, library, linear, moe, rows, sample};
use crate::library::{FAMILIES, Family};

/// Whether a test fails without the barrier.
fn seen(barrier: BarrierId, test: impl Fn() + UnwindSafe) -> bool {
    WITHOUT.set(Some(barrier));
    let failed = catch_unwind(test).is_err();
    WITHOUT.set(None);
    failed
}

#[test]
fn removing_any_barrier_shows() {
    let tests: [(&str, &str, fn()); 22] = [
        ("rms_norm", "rms_norm", rows::norm_of_rows_shorter_and_longer_than_a_threadgroup),
        ("matvec", "matvec_f32", linear::matvec_of_every_type),
        ("qkv", "qkv_f32", linear::qkv_of_every_type),
        ("gated_mlp", "gated_mlp_f32", linear::gated_mlp_of_every_type_and_activation),
        ("qkv_any", "qkv_any", any::projections_of_several_types),
        ("gated_mlp_any", "gated_mlp_any", any::gates_of_several_types),
        ("moe_gated", "moe_gated", moe::experts_of_every_type),
        ("moe_down", "moe_down", moe::experts_of_several_types_and_rows),
        ("matvec_joined", "matvec_joined_f32", linear::products_of_joined_shares),
        (
            "attention_append",
            "attention_append_f32",
            attention::the_append_and_the_first_stage_in_one,
        ),
        ("moe_group", "moe_group", moe::experts_of_many_rows),
        ("grouped_gated", "grouped_gated", moe::experts_of_many_rows),
        ("grouped_down", "grouped_down", moe::experts_of_many_rows),
        ("matmul_small", "matmul_small_f32", linear::small_matmul_of_every_type),
        ("matmul_tiled", "matmul_tiled_f32", linear::tiled_matmul_of_every_type),
        ("rope_write", "rope_write_f32", rows::rope_and_append_in_one),
        ("attention_tiled", "attention_tiled_f32", attention::every_number_of_keys),
        ("gather", "gather", sample::draws_are_those_of_the_host),
        ("tally", "draw_token", sample::draws_are_those_of_the_host),
        ("draw_token", "draw_token", sample::draws_are_those_of_the_host),
        ("argmax_pick", "argmax_pick", rows::a_chains_row_is_replaced_by_its_successor),
        ("argmax_parts", "argmax_parts", rows::the_highest_logit_wins_and_ties_go_to_the_lowest_id),
    ];
    let mut removed = 0;
    for (function, entry, test) in tests {
        for (n, site) in library(entry).barriers().iter().enumerate() {
            if site.function == function {
                let barrier = library(entry).barrier_id(n);
                assert!(seen(barrier, test), "nothing sees that {site:?} is gone");
                removed += 1;
            }
        }
    }
    let of = |family: &Family| library(&family.entries()[0]).barriers().len();
    let all: usize = FAMILIES.iter().map(of).sum();
    assert_eq!(removed, all, "barriers in functions that no test covers");
}
