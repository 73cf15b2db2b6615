//! Writes every family of kernels as the driver gets it into a folder, for a compiler of Metal that is given files: `sources FOLDER`.

#![allow(clippy::print_stdout, reason = "the list of what was written is the output")]

use std::path::PathBuf;

use fornax_metal::MetalDevice;

fn main() -> std::io::Result<()> {
    let folder = PathBuf::from(std::env::args_os().nth(1).unwrap_or_else(|| ".".into()));
    std::fs::create_dir_all(&folder)?;
    for (name, source) in MetalDevice::sources() {
        let path = folder.join(name).with_extension("metal");
        std::fs::write(&path, source)?;
        println!("{}", path.display());
    }
    Ok(())
}
