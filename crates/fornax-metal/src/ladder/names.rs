//! The names that the host makes are the names that the sources declare.

use std::collections::BTreeSet;

use super::library;
use crate::library::{FAMILIES, family_of};

/// The constants of the host's, word by word, are the structures of the kernels.
#[test]
fn constants_are_as_long_as_the_kernels_structures() {
    use crate::args::{
        AppendArgs, AttentionArgs, ConvArgs, CopyArgs, DownArgs, DrawArgs, EmbedArgs, ExpertArgs,
        GatedArgs, GroupArgs, GroupedArgs, GroupedDownArgs, JoinedArgs, KvWriteArgs, MatmulArgs,
        NormArgs, PartsArgs, PenaltyArgs, PickArgs, QkvArgs, RopeArgs, RopeWriteArgs, RouteArgs,
        SelectArgs,
    };
    let sizes = [
        ("embed_q8_0", size_of::<EmbedArgs>()),
        ("rms_norm", size_of::<NormArgs>()),
        ("copy", size_of::<CopyArgs>()),
        ("select_rows", size_of::<SelectArgs>()),
        ("matvec_q4_k", size_of::<MatmulArgs>()),
        ("matmul_small_f16", size_of::<MatmulArgs>()),
        ("matmul_tiled_f16", size_of::<MatmulArgs>()),
        ("qkv_f32", size_of::<QkvArgs>()),
        ("gated_mlp_f32", size_of::<GatedArgs>()),
        ("activate", size_of::<GatedArgs>()),
        ("norm_rope", size_of::<RopeArgs>()),
        ("kv_write_f32", size_of::<KvWriteArgs>()),
        ("rope_write_f16", size_of::<RopeWriteArgs>()),
        ("attention_split_f32", size_of::<AttentionArgs>()),
        ("attention_reduce", size_of::<AttentionArgs>()),
        ("attention_tiled_f16", size_of::<AttentionArgs>()),
        ("short_conv", size_of::<ConvArgs>()),
        ("moe_route", size_of::<RouteArgs>()),
        ("moe_gated", size_of::<ExpertArgs>()),
        ("moe_group", size_of::<GroupArgs>()),
        ("grouped_gated", size_of::<GroupedArgs>()),
        ("grouped_down", size_of::<GroupedDownArgs>()),
        ("grouped_sum", size_of::<GroupedDownArgs>()),
        ("moe_down", size_of::<DownArgs>()),
        ("attention_append_q8_0", size_of::<AppendArgs>()),
        ("matvec_joined_q4_k", size_of::<JoinedArgs>()),
        ("argmax_parts", size_of::<PartsArgs>()),
        ("argmax_pick", size_of::<PickArgs>()),
        ("penalise", size_of::<PenaltyArgs>()),
        ("gather", size_of::<DrawArgs>()),
        ("draw_token", size_of::<DrawArgs>()),
    ];
    for (name, size) in sizes {
        let library = library(name);
        let kernel = library.kernels().iter().find(|k| k.name == name).expect(name);
        let last = kernel.arguments.last().expect("an argument");
        assert_eq!((last.name.as_str(), last.size), ("args", size), "{name}");
        let slots: Vec<u32> = kernel.arguments.iter().map(|a| a.index).collect();
        assert!(slots.iter().enumerate().all(|(i, s)| i == *s as usize), "{name}: {slots:?}");
    }
}

#[test]
fn entries_are_those_of_the_sources() {
    for family in FAMILIES {
        let made: BTreeSet<String> = family.entries().into_iter().collect();
        assert_eq!(made.len(), family.entries().len(), "{}: a name twice", family.name);
        let first = made.first().expect("a kernel");
        let found = library(first).kernels().iter().map(|k| k.name.clone()).collect();
        assert_eq!(made, found, "{}", family.name);
    }
    assert_eq!(family_of("matvec_q2_k"), None);
}

/// What the head of each source says of its kernels.
#[test]
fn heads_say_layout_threads_bytes_and_accumulator() {
    for family in FAMILIES {
        let (name, text) = family.sources.last().expect("a source");
        let lines = text.lines().take_while(|l| l.starts_with("//"));
        let head: String = lines.flat_map(|l| [l, "\n"]).collect();
        for said in ["Layout: ", "Threads: ", "Bytes: ", "ccumulate"] {
            assert!(head.contains(said), "{name} does not say: {said}");
        }
    }
}
