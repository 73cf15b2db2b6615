//! Writes what goes around the prepared code: the include before it, and after it the table that tells the host of kernels,
//! their arguments and the function constants. It knows no compiler.

use std::fmt::Write as _;

use crate::Error;
use crate::prepare::{Kernel, Prepared};
use crate::signature::{Parameter, built_in};

/// The complete C++ source.
///
/// # Errors
/// A parameter that depends on a function constant which the source does not declare.
pub(crate) fn complete(p: &Prepared) -> Result<String, Error> {
    let mut out = String::from("#include \"kernel.h\"\n");
    out.push_str(&p.code);
    out.push_str("\n# 1 \"(table of kernels)\"\nnamespace {\nusing namespace metal;\n");
    let write_error = |_| Error::host("formatting failed");
    for (n, kernel) in p.kernels.iter().enumerate() {
        specs(&mut out, n, kernel, p)?;
    }
    writeln!(out, "template <class T> constexpr uint32_t msl_kind() {{ return std::is_same_v<T, bool> ? 0 : std::is_same_v<T, half> ? 3 : std::is_same_v<T, float> ? 4 : std::is_signed_v<T> ? 1 : 2; }}").map_err(write_error)?;
    writeln!(out, "MSL_RAW void msl_derive() {{\n{}}}\n}}", p.derived).map_err(write_error)?;
    out.push_str("extern \"C\" MSL_RAW const msl::Table *msl_table() {\n");
    out.push_str("  static msl::KernelDesc kernels[] = {\n");
    for (n, k) in p.kernels.iter().enumerate() {
        writeln!(
            out,
            "    msl::Entry<&::{}>::kernel(\"{}\", args{n}, {}, uint32_t({})),",
            k.function,
            k.host_name,
            k.parameters.len(),
            k.max_threads
        )
        .map_err(write_error)?;
    }
    out.push_str("    {}};\n  static msl::ConstantDesc constants[] = {\n");
    for c in &p.constants {
        writeln!(
            out,
            "    {{\"{0}\", uint32_t({1}), msl_kind<{2}>(), sizeof({2}), &{0}, &msl_set_{0}}},",
            c.name, c.id, c.type_text
        )
        .map_err(write_error)?;
    }
    writeln!(
        out,
        "    {{}}}};\n  static msl::Table table = {{kernels, {}, constants, {}, msl_derive, uintptr_t(&__ehdr_start), uintptr_t(&_end)}};\n  return &table;\n}}",
        p.kernels.len(),
        p.constants.len()
    )
    .map_err(write_error)?;
    Ok(out)
}

fn specs(out: &mut String, n: usize, kernel: &Kernel, p: &Prepared) -> Result<(), Error> {
    let write_error = |_| Error::host("formatting failed");
    writeln!(out, "const msl::ArgSpec args{n}[] = {{").map_err(write_error)?;
    for parameter in &kernel.parameters {
        let (source, index) = source(parameter);
        let space = match parameter.space {
            Some("device") => "DEVICE_SPACE",
            Some("constant") => "CONSTANT_SPACE_OF",
            Some("threadgroup") => "THREADGROUP_SPACE",
            _ => "NO_SPACE",
        };
        let needs = match parameter.attributes.iter().find(|a| a.name == "function_constant") {
            None => "-1".to_owned(),
            Some(a) => {
                let wanted = a.value.clone().unwrap_or_default();
                let found = p.constants.iter().find(|c| c.name == wanted.trim());
                found.map(|c| c.id.clone()).ok_or_else(|| {
                    Error::compile(format!(
                        "kernel {}: parameter '{}' depends on '{wanted}', which is no function constant",
                        kernel.host_name, parameter.name
                    ))
                })?
            }
        };
        writeln!(
            out,
            "  {{\"{}\", \"{}\", msl::{source}, uint32_t({index}), msl::{space}, {}, int32_t({needs})}},",
            parameter.name,
            parameter.type_text.replace('\\', "\\\\").replace('"', "\\\""),
            parameter.read_only
        )
        .map_err(write_error)?;
    }
    out.push_str("  {}};\n");
    Ok(())
}

fn source(parameter: &Parameter) -> (&'static str, String) {
    for a in &parameter.attributes {
        let index = || a.value.clone().unwrap_or("0".to_owned());
        match a.name.as_str() {
            "buffer" => return ("BUFFER", index()),
            "threadgroup" => return ("THREADGROUP", index()),
            name => {
                if let Some(source) = built_in(name) {
                    return (source, "0".to_owned());
                }
            }
        }
    }
    // The pass has refused parameters without a known attribute.
    ("BUFFER", "0".to_owned())
}
