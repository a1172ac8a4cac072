//! Copies the shaders without comments and indentation, a quarter of their text: a browser downloads them with the engine.

use std::path::{Path, PathBuf};
use std::{env, error, fs};

fn main() -> Result<(), Box<dyn error::Error>> {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shaders");
    let to = PathBuf::from(env::var("OUT_DIR")?);
    println!("cargo::rerun-if-changed={}", from.display());
    for file in fs::read_dir(from)? {
        let file = file?;
        let text = fs::read_to_string(file.path())?;
        // WGSL has no strings that could hold slashes.
        let lines = text.lines().map(|line| line.split("//").next().unwrap_or_default().trim());
        let lines: Vec<&str> = lines.filter(|line| !line.is_empty()).collect();
        fs::write(to.join(file.file_name()), lines.join("\n") + "\n")?;
    }
    Ok(())
}
