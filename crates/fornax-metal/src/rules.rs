//! Metal's rules that C++ does not have, held against the text of every kernel source: the emulator compiles more than
//! a device's compiler takes, and each of these would be seen on a Mac first. It runs nothing.

mod calls;

use std::collections::BTreeMap;
use std::ops::Range;

use crate::library::FAMILIES;

/// A word, a number, a string, or one character of anything else, and its line.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Token {
    text: String,
    line: usize,
}

/// The source without comments and directives, in tokens.
fn tokens(text: &str) -> Vec<Token> {
    let mut all = Vec::new();
    let mut directive = false;
    for (at, line) in text.lines().enumerate() {
        let is_directive = directive || line.trim_start().starts_with('#');
        directive = is_directive && line.ends_with('\\');
        let code = line.split("//").next().unwrap_or_default();
        if is_directive {
            continue;
        }
        let mut rest = code.trim_start();
        while let Some(first) = rest.chars().next() {
            let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
            let len = if first.is_ascii_digit() {
                number(rest)
            } else if word(first) {
                rest.find(|c| !word(c)).unwrap_or(rest.len())
            } else if first == '"' {
                rest[1..].find('"').map_or(rest.len(), |end| end + 2)
            } else {
                first.len_utf8()
            };
            all.push(Token { text: rest[..len].to_string(), line: at + 1 });
            rest = rest[len..].trim_start();
        }
    }
    all
}

/// The length of the number that `text` begins with.
fn number(text: &str) -> usize {
    let hex = text.starts_with("0x");
    let mut before = '0';
    for (at, c) in text.char_indices() {
        let exponent = !hex && "eE".contains(before) && "+-".contains(c);
        if !(c.is_ascii_alphanumeric() || c == '.' || exponent) {
            return at;
        }
        before = c;
    }
    text.len()
}

/// Where the bracket opened at `open` closes.
fn close(tokens: &[Token], open: usize) -> usize {
    let mut depth = 0;
    for (at, t) in tokens.iter().enumerate().skip(open) {
        match t.text.as_str() {
            "(" | "{" | "[" => depth += 1,
            ")" | "}" | "]" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at;
        }
    }
    panic!("line {}: a bracket that nothing closes", tokens[open].line);
}

struct Kernel {
    name: String,
    parameters: Vec<Vec<String>>,
    body: Range<usize>,
}

fn kernels(tokens: &[Token]) -> Vec<Kernel> {
    let mut all = Vec::new();
    for at in 0..tokens.len().saturating_sub(3) {
        let is = |i: usize, text: &str| tokens[at + i].text == text;
        if !is(0, "kernel") || !is(1, "void") || !is(3, "(") {
            continue;
        }
        let end = close(tokens, at + 3);
        let mut parameters = vec![Vec::new()];
        let mut depth = 0;
        for t in &tokens[at + 4..end] {
            match t.text.as_str() {
                "(" | "[" | "<" => depth += 1,
                ")" | "]" | ">" => depth -= 1,
                "," if depth == 0 => {
                    parameters.push(Vec::new());
                    continue;
                }
                _ => {}
            }
            parameters.last_mut().expect("one at least").push(t.text.clone());
        }
        assert_eq!(tokens[end + 1].text, "{", "line {}", tokens[end].line);
        let body = end + 1..close(tokens, end + 1);
        all.push(Kernel { name: tokens[at + 2].text.clone(), parameters, body });
    }
    all
}

/// Every file once, by name.
fn sources() -> BTreeMap<&'static str, &'static str> {
    FAMILIES.iter().flat_map(|f| f.sources.iter().copied()).collect()
}

fn each(mut check: impl FnMut(&str, &[Token], &[Kernel])) {
    let all = sources();
    assert!(all.len() > 8, "{} sources", all.len());
    for (name, text) in all {
        let tokens = tokens(text);
        check(name, &tokens, &kernels(&tokens));
    }
}

#[test]
fn threadgroup_memory_is_declared_in_kernels_alone_and_never_initialised() {
    let mut found = 0;
    each(|name, tokens, kernels| {
        for (at, t) in tokens.iter().enumerate().filter(|(_, t)| t.text == "threadgroup") {
            // `threadgroup T a[N], b;` declares memory; a `*` or `&` in between, a pointer to some.
            let end =
                (at..tokens.len()).find(|i| [";", ")", "{", "="].contains(&&*tokens[*i].text));
            let statement = &tokens[at..end.unwrap_or(tokens.len())];
            if statement.iter().take(4).any(|t| t.text == "*" || t.text == "&") {
                continue;
            }
            let place = format!("{name}:{}", t.line);
            assert!(kernels.iter().any(|k| k.body.contains(&at)), "{place}: outside of a kernel");
            assert_eq!(end.map(|e| &*tokens[e].text), Some(";"), "{place}: initialised");
            found += 1;
        }
    });
    assert!(found > 5, "{found} declarations");
}

/// Built-in arguments that the kernels may ask for, and their types.
const BUILT_IN: [(&str, &[&str]); 9] = [
    ("threadgroup_position_in_grid", &["uint", "uint2", "uint3"]),
    ("threadgroups_per_grid", &["uint", "uint2", "uint3"]),
    ("thread_position_in_grid", &["uint", "uint2", "uint3"]),
    ("threads_per_grid", &["uint", "uint2", "uint3"]),
    ("threads_per_threadgroup", &["uint", "uint2", "uint3"]),
    ("thread_index_in_threadgroup", &["uint"]),
    ("thread_index_in_simdgroup", &["uint"]),
    ("simdgroup_index_in_threadgroup", &["uint"]),
    ("simdgroups_per_threadgroup", &["uint"]),
];

/// Pairs that must be of one type.
const PAIRS: [(&str, &str); 2] = [
    ("threadgroup_position_in_grid", "threadgroups_per_grid"),
    ("thread_position_in_grid", "threads_per_grid"),
];

#[test]
fn every_parameter_has_its_attribute_and_buffers_are_numbered_as_they_are_bound() {
    let mut seen = 0;
    each(|file, _, kernels| {
        for Kernel { name, parameters, .. } in kernels {
            let mut types: BTreeMap<&str, &str> = BTreeMap::new();
            let mut buffers = 0;
            for p in parameters {
                let said = p.join(" ");
                let at = p
                    .iter()
                    .position(|t| t == "[")
                    .unwrap_or_else(|| panic!("{file} {name}: {said}"));
                let attribute = p[at + 2].as_str();
                if attribute == "buffer" {
                    assert_eq!(p[at + 4], buffers.to_string(), "{file} {name}: {said}");
                    assert!(["device", "constant"].contains(&&*p[0]), "{file} {name}: {said}");
                    let reference = p.contains(&"&".to_string());
                    assert!(reference || p.contains(&"*".to_string()), "{file} {name}: {said}");
                    assert!(!p.iter().any(|t| t == "size_t" || t == "ptrdiff_t" || t == "bool"));
                    buffers += 1;
                    continue;
                }
                let known = BUILT_IN.iter().find(|(n, _)| *n == attribute);
                let (_, allowed) = known.unwrap_or_else(|| panic!("{file} {name}: {said}"));
                assert!(allowed.contains(&&*p[0]), "{file} {name}: {said}");
                assert!(types.insert(attribute, &p[0]).is_none(), "{file} {name}: {said} twice");
            }
            assert!(buffers <= 31, "{file} {name}: {buffers} buffers");
            let last = parameters.iter().rfind(|p| p.contains(&"buffer".to_string()));
            let last = last.expect("a buffer");
            assert!(
                last[0] == "constant" && last.contains(&"&".to_string()),
                "{file} {name}: the constants are not last"
            );
            for (a, b) in PAIRS {
                if let (Some(a), Some(b)) = (types.get(a), types.get(b)) {
                    assert_eq!(a, b, "{file} {name}");
                }
            }
            seen += 1;
        }
    });
    assert!(seen > 20, "{seen} kernels");
}

/// The fields of every structure of the text whose name ends in `Args`, in words of the host's.
fn structures(tokens: &[Token]) -> BTreeMap<String, Vec<(String, String)>> {
    let mut all = BTreeMap::new();
    for (at, t) in tokens.iter().enumerate() {
        let Some(name) = tokens.get(at + 1).filter(|n| n.text.ends_with("Args")) else { continue };
        if t.text != "struct" {
            continue;
        }
        let mut fields = Vec::new();
        for statement in tokens[at + 3..close(tokens, at + 2)].split(|t| t.text == ";") {
            let Some((ty, names)) = statement.split_first() else { continue };
            let ty = match ty.text.as_str() {
                "uint" => "u32",
                "float" => "f32",
                // The constants of another kernel, in their place.
                other => other,
            };
            let names = names.iter().filter(|t| t.text != ",");
            fields.extend(names.map(|n| (n.text.clone(), ty.to_string())));
        }
        all.insert(name.text.clone(), fields);
    }
    all
}

/// The fields of the host's structure of that name, as its source says them.
fn host_fields(name: &str) -> Vec<(String, String)> {
    let host = include_str!("args.rs");
    let start =
        host.find(&format!(" {name} {{")).unwrap_or_else(|| panic!("the host has no {name}"));
    let text = &host[start..];
    let text = &text[text.find('{').expect("found") + 1..text.find('}').expect("closed")];
    let fields = text.lines().map(|line| line.split("//").next().unwrap_or_default());
    let fields = fields.flat_map(|line| line.split(',')).filter_map(|f| f.trim().split_once(": "));
    fields.map(|(n, ty)| (n.trim().to_string(), ty.trim().to_string())).collect()
}

#[test]
fn constants_have_the_hosts_fields_in_the_hosts_order() {
    let mut seen = 0;
    each(|file, tokens, _| {
        for (name, fields) in structures(tokens) {
            // A structure within one is flat on the host.
            let flat = fields.into_iter().flat_map(|(field, ty)| {
                if ty.ends_with("Args") { host_fields(&ty) } else { vec![(field, ty)] }
            });
            assert_eq!(flat.collect::<Vec<_>>(), host_fields(&name), "{file}: {name}");
            seen += 1;
        }
    });
    assert!(seen > 10, "{seen} structures");
}

/// What Metal lacks, what changes with the compiler's mood, and what only some devices have.
const FORBIDDEN: [&str; 25] = [
    "double",
    "goto",
    "new",
    "delete",
    "virtual",
    "throw",
    "try",
    "catch",
    "thread_local",
    "dynamic_cast",
    "reinterpret_cast",
    "typeid",
    "printf",
    "assert",
    "std",
    "size_t",
    "ptrdiff_t",
    "int64_t",
    "uint64_t",
    "asm",
    "bfloat",
    "fast",
    "simd_ballot",
    "quad_sum",
    "atomic_thread_fence",
];

#[test]
fn no_word_stands_in_a_kernel_that_metal_or_its_safe_math_lacks() {
    each(|file, tokens, _| {
        for (at, t) in tokens.iter().enumerate() {
            let word = t.text.as_str();
            assert!(!FORBIDDEN.contains(&word), "{file}:{}: {word}", t.line);
            assert!(
                word != "main" && (word != "long" || tokens[at + 1].text != "long"),
                "{file}:{}",
                t.line
            );
            let next = tokens.get(at + 1).map_or("", |t| &t.text);
            // `if constexpr`, lambdas: the language before Metal 4 is C++14 without them.
            assert!(!(word == "if" && next == "constexpr"), "{file}:{}: if constexpr", t.line);
        }
    });
}

#[test]
fn numbers_with_a_point_are_floats_or_halves() {
    let mut seen = 0;
    each(|file, tokens, _| {
        for t in tokens.iter().filter(|t| t.text.starts_with(|c: char| c.is_ascii_digit())) {
            let hex = t.text.starts_with("0x");
            let real = !hex && (t.text.contains('.') || t.text.contains('e'));
            let single = t.text.ends_with('f') || t.text.ends_with('h');
            assert!(!real || single, "{file}:{}: {} is a double", t.line, t.text);
            seen += usize::from(real);
        }
    });
    assert!(seen > 20, "{seen} numbers");
}

const TYPES: [&str; 16] = [
    "float", "float2", "float4", "half", "half2", "half4", "uint", "uint2", "uint4", "int",
    "uchar", "char", "ushort", "short", "char2", "char4",
];
const SPACES: [&str; 4] = ["device", "constant", "threadgroup", "thread"];

#[test]
fn every_pointer_says_where_it_points() {
    let mut seen = 0;
    each(|file, tokens, _| {
        for (at, t) in tokens.iter().enumerate() {
            let points = tokens.get(at + 1).is_some_and(|n| n.text == "*" || n.text == "&");
            let more = tokens.get(at + 2).is_some_and(|n| n.text != "&");
            if !(TYPES.contains(&&*t.text) || t.text.ends_with("Args")) || !points || !more {
                continue;
            }
            let before = tokens[..at].iter().rev();
            let mut same =
                before.take_while(|t| !["(", ",", ";", "{", "}", "<"].contains(&&*t.text));
            assert!(same.any(|t| SPACES.contains(&&*t.text)), "{file}:{}: {}", t.line, t.text);
            seen += 1;
        }
    });
    assert!(seen > 100, "{seen} pointers");
}

#[test]
fn blocks_are_read_in_units_of_two_bytes_at_most() {
    let mut seen = 0;
    for (name, text) in sources() {
        let shared = ["blocks.metal", "more.metal", "codebooks.metal"].contains(&name);
        let tokens = tokens(text);
        // The one structure whose elements are aligned to four.
        let is_f32 = |at: usize| {
            let structure = tokens[..at].iter().rposition(|t| t.text == "struct");
            structure.is_some_and(|s| tokens[s + 1].text == "F32")
        };
        for (at, t) in tokens.iter().enumerate().filter(|(_, t)| shared && t.text == "device") {
            if tokens[at - 1].text != "("
                || tokens[at + 1].text != "const"
                || tokens[at + 4].text != ")"
            {
                continue;
            }
            let ty = tokens[at + 2].text.as_str();
            let narrow = ["uchar", "char", "ushort", "short", "half"].contains(&ty);
            assert!(narrow || ty == "float" && is_f32(at), "{name}:{}: a cast to {ty}", t.line);
            seen += 1;
        }
    }
    assert!(seen > 5, "{seen} casts");
}

#[test]
fn data_outside_of_functions_is_constant() {
    each(|file, tokens, _| {
        let mut at = 0;
        while at < tokens.len() {
            // A declaration ends with `;`, or with the `}` of a function, structure or table.
            let end = (at..tokens.len())
                .find(|i| [";", "{"].contains(&&*tokens[*i].text))
                .unwrap_or(tokens.len() - 1);
            let words: Vec<&str> = tokens[at..end].iter().map(|t| t.text.as_str()).collect();
            let first = words.first().copied().unwrap_or(";");
            let other = [
                "using", "struct", "template", "kernel", "inline", "static", "enum", "typedef",
                "KERNEL", ";",
            ];
            let function = words.contains(&"(") && !words.contains(&"=");
            let plain = first == "constant" || other.contains(&first) || function;
            assert!(plain, "{file}:{}: {}", tokens[at].line, words.join(" "));
            assert!(first != "static" || function, "{file}:{}: static data", tokens[at].line);
            at = if tokens[end].text == "{" { close(tokens, end) + 1 } else { end + 1 };
        }
    });
}

#[test]
fn what_breaks_a_rule_is_seen() {
    let bad =
        tokens("float f(thread float *x) { threadgroup float t[4]; return 1.0 + x[0]; } // 2.0");
    assert_eq!(kernels(&bad).len(), 0);
    assert!(bad.iter().any(|t| t.text == "1.0") && !bad.iter().any(|t| t.text == "2.0"));
    let good = tokens(
        "kernel void k(device float *x [[buffer(0)]],\n uint i [[thread_position_in_grid]]) { x[i] = 1.0f; }",
    );
    let found = kernels(&good);
    assert_eq!((found[0].name.as_str(), found[0].parameters.len()), ("k", 2));
    assert_eq!(found[0].parameters[1][0], "uint");
    let args = structures(&tokens("struct XArgs {\n uint rows, width;\n float eps;\n};"));
    assert_eq!(args["XArgs"].len(), 3);
    assert_eq!(args["XArgs"][2], ("eps".to_string(), "f32".to_string()));
}
