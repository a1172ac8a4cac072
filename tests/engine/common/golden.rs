//! The folders of `tests/golden`, and the least that a reference must hold.

use std::path::{Path, PathBuf};

use libtest_mimic::{Failed, Trial};
use safetensors::SafeTensors;
use selkie_core::config::Config;
use selkie_core::models;

/// Number of folders, all of which run. A smaller number means that a test was lost.
const FOLDERS: usize = 29;
/// Families that they are of.
const FAMILIES: usize = 18;
/// Prompts of a reference. The longest one comes with the final states.
const PROMPTS: usize = 2;

/// A test of the number of folders, and one of the extent of each reference.
pub fn trials() -> Vec<Trial> {
    let count = || match (folders().len(), families().len()) {
        (folders, families) if folders >= FOLDERS && families >= FAMILIES => Ok(()),
        found => Err(Failed::from(format!("{found:?} folders and families; there were {FOLDERS} and {FAMILIES}"))),
    };
    let mut trials = vec![Trial::test("golden: no folder is lost", count)];
    trials.extend(folders().into_iter().map(|dir| {
        let name = dir.file_name().expect("a folder").to_string_lossy().into_owned();
        Trial::test(format!("golden: extent of {name}"), move || extent(&dir))
    }));
    trials
}

/// The folders, by name.
pub fn folders() -> Vec<PathBuf> {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden");
    let entries = std::fs::read_dir(golden).expect("the references are part of the repository");
    let mut dirs: Vec<PathBuf> = entries.map(|e| e.expect("readable").path()).filter(|p| p.is_dir()).collect();
    dirs.sort();
    dirs
}

/// The folder of each family, which is called like its `model_type`; the others are variants of one.
pub fn families() -> Vec<PathBuf> {
    let is_family = |dir: &PathBuf| config(dir).is_ok_and(|c| c.model_type().is_ok_and(|name| dir.ends_with(name)));
    folders().into_iter().filter(is_family).collect()
}

fn config(dir: &Path) -> Result<Config, Failed> {
    let bytes = std::fs::read(dir.join("config.json"))?;
    Config::parse("config.json", &bytes).map_err(|e| e.to_string().into())
}

/// Logits of enough prompts, and every state that the model keeps after the longest one.
fn extent(dir: &Path) -> Result<(), Failed> {
    let bytes = std::fs::read(dir.join("reference.safetensors"))?;
    let file = SafeTensors::deserialize(&bytes)?;
    let rows = |name: String| file.tensor(&name).map(|t| t.shape()[0]);
    let (mut prompts, mut longest) = (0, (0, 0));
    while let Ok(tokens) = rows(format!("prompt{prompts}.input_ids")) {
        if rows(format!("prompt{prompts}.logits"))? != tokens {
            return Err(format!("prompt {prompts} has not the logits of all {tokens} tokens").into());
        }
        longest = longest.max((tokens, prompts));
        prompts += 1;
    }
    let spec = models::spec(&config(dir)?).map_err(|e| e.to_string())?;
    let kept = |l: &selkie_core::layer::LayerState| {
        2 * usize::from(l.kv.is_some()) + usize::from(l.conv.is_some()) + usize::from(l.recurrent.is_some())
    };
    let want: usize = spec.layers.iter().map(kept).sum();
    let states = format!("prompt{}.state.", longest.1);
    let found = file.names().iter().filter(|n| n.starts_with(&states)).count();
    if prompts < PROMPTS || want == 0 || found != want {
        return Err(format!("{prompts} prompts, {found} states for {want} of the model").into());
    }
    Ok(())
}
