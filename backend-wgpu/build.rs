//! Copies the shaders without comments and indentation, a quarter of their text: a browser downloads them with the engine.

use std::path::{Path, PathBuf};
use std::{env, error, fs};

fn main() -> Result<(), Box<dyn error::Error>> {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shaders");
    let to = PathBuf::from(env::var("OUT_DIR")?);
    println!("cargo::rerun-if-changed={}", from.display());
    for file in fs::read_dir(from)? {
        let path = file?.path();
        if path.extension().is_none_or(|e| e != "wgsl") {
            continue;
        }
        let text = fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        // WGSL has no strings that could hold slashes.
        let lines = text.lines().map(|line| line.split("//").next().unwrap_or_default().trim());
        let lines: Vec<&str> = lines.filter(|line| !line.is_empty()).collect();
        fs::write(to.join(path.file_name().ok_or("a file without a name")?), lines.join("\n") + "\n")?;
    }
    Ok(())
}
