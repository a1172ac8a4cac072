//! A model directory as a whole: which files there are, and what they say about each other.

use std::{rc::Rc, sync::Arc};

use serde_json::{Map, Value};

use crate::{
    Error, Result,
    chat::{ChatTemplate, render::Renderer},
    checkpoint::Checkpoint,
    config::{Config, parse_object},
    fnv,
    generation::GenerationConfig,
    source::{Source, read_small},
    tokenizer::Tokenizer,
};

const CONFIG: &str = "config.json";
const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// Limits in bytes on files that are read whole.
const MAX_JSON: u64 = 16 << 20;
const MAX_TOKENIZER: u64 = 256 << 20;
/// How many places of the weights go into the fingerprint, and how many bytes of each.
const SAMPLES: usize = 32;
const SAMPLE_BYTES: u64 = 256;

/// Everything a model's files say. Without a tokenizer, token ids still work.
pub struct ModelFiles {
    /// What to call the model: the last part of where it came from.
    pub name: String,
    /// `config.json`.
    pub config: Config,
    /// `generation_config.json`; its defaults if there is none.
    pub generation: GenerationConfig,
    /// `tokenizer.json`, if there is one. It is lent to threads that prepare prompts, and so is the template.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// The chat template, if there is one.
    pub chat: Option<Arc<ChatTemplate>>,
    /// The weights.
    pub checkpoint: Checkpoint,
    label: String,
    config_hash: u64,
}

impl ModelFiles {
    /// Reads all files but the tensors themselves. `now` gives the seconds since 1970 (UTC) for chat templates that print the
    /// date.
    ///
    /// # Errors
    /// [`Error::BadModel`] naming the file that is missing or wrong; those of the source.
    pub async fn open(source: Rc<dyn Source>, now: fn() -> u64) -> Result<Self> {
        let checkpoint = Checkpoint::open(source.clone());
        Self::read(source, now, checkpoint).await
    }

    /// The same with random weights, see [`Checkpoint::random`]; only `config.json` has to be there.
    ///
    /// # Errors
    /// As for [`ModelFiles::open`].
    pub async fn open_random(source: Rc<dyn Source>, now: fn() -> u64, seed: u64) -> Result<Self> {
        let random = async move { Ok(Checkpoint::random(seed)) };
        Self::read(source, now, random).await
    }

    async fn read(
        source: Rc<dyn Source>,
        now: fn() -> u64,
        checkpoint: impl Future<Output = Result<Checkpoint>>,
    ) -> Result<Self> {
        let label = source.label();
        let Some(bytes) = read_small(&*source, CONFIG, MAX_JSON).await? else {
            let why = format!(
                "there is no {CONFIG}; give the directory of a Hugging Face model, with {CONFIG} and the weights"
            );
            return Err(Error::model(label, why));
        };
        let config = Config::parse(&source.path(CONFIG), &bytes)?;
        let config_hash = fnv::hash(fnv::START, &bytes);
        let generation = match read_small(&*source, "generation_config.json", MAX_JSON).await? {
            Some(bytes) => GenerationConfig::parse(&source.path("generation_config.json"), &bytes)?,
            None => GenerationConfig::default(),
        };
        let path = source.path(TOKENIZER_CONFIG);
        let settings = match read_small(&*source, TOKENIZER_CONFIG, MAX_JSON).await? {
            Some(bytes) => Some(parse_object(&path, &bytes)?),
            None => None,
        };
        let tokenizer = match read_small(&*source, TOKENIZER, MAX_TOKENIZER).await? {
            Some(bytes) => Some(Arc::new(Tokenizer::new(&source.path(TOKENIZER), &bytes, settings.as_ref())?)),
            None => None,
        };
        let chat = chat_template(&*source, settings.as_ref()).await?;
        let chat = chat.map(|(file, text)| Arc::new(ChatTemplate::new(&source.path(file), &text, now)));
        let checkpoint = checkpoint.await?;
        let name =
            label.rsplit(['/', '\\']).find(|part| !matches!(*part, "" | "." | "..")).unwrap_or("model").to_owned();
        Ok(Self { name, config, generation, tokenizer, chat, checkpoint, label, config_hash })
    }

    /// Has the chat template rendered by `renderer` from now on, see [`ChatTemplate::rendered_by`].
    pub fn render_with(&mut self, renderer: Arc<dyn Renderer>) {
        self.chat = self.chat.take().map(|chat| Arc::new(chat.rendered_by(renderer)));
    }

    /// Where the files came from, as messages name it.
    pub fn label(&self) -> &str {
        &self.label
    }

    /// The tokenizer of a model that is to read or write text.
    ///
    /// # Errors
    /// [`Error::BadModel`] if there is none.
    pub fn tokenizer(&self) -> Result<&Arc<Tokenizer>> {
        let why = || format!("there is no {TOKENIZER}, so this model takes token ids only; add the file to use text");
        self.tokenizer.as_ref().ok_or_else(|| Error::model(&self.label, why()))
    }

    /// The chat template of a model that is to chat.
    ///
    /// # Errors
    /// [`Error::BadModel`] if there is none.
    pub fn chat(&self) -> Result<&Arc<ChatTemplate>> {
        let why = "there is no chat template, so this model only continues text; use the prompt as it is (raw)";
        self.chat.as_ref().ok_or_else(|| Error::model(&self.label, why))
    }

    /// The tokens that end a text: those of `generation_config.json`, else of `config.json`, else the tokenizer's.
    ///
    /// # Errors
    /// [`Error::BadModel`] if the key of `config.json` is ill-typed.
    pub fn eos(&self) -> Result<Vec<u32>> {
        if !self.generation.eos.is_empty() {
            return Ok(self.generation.eos.clone());
        }
        let eos = self.config.eos_token_ids()?;
        if !eos.is_empty() {
            return Ok(eos);
        }
        let named = self.tokenizer.as_ref().and_then(|t| t.token_id(t.named_token("eos_token")?));
        Ok(named.into_iter().collect())
    }

    /// A number that tells models apart whose cached states must not be mixed: of the configuration, the names, shapes and
    /// dtypes of all tensors, and bytes from places spread over the weights. Equal files have equal fingerprints everywhere;
    /// it is no defence against somebody who makes files collide.
    ///
    /// # Errors
    /// Those of the source.
    pub async fn fingerprint(&self) -> Result<u64> {
        let mut hash = self.config_hash;
        let names: Vec<&str> = self.checkpoint.names().collect();
        for name in &names {
            let info = self.checkpoint.info(name).expect("the name was listed");
            hash = fnv::hash(hash, format!("{name} {} {:?}\n", info.dtype, info.shape).as_bytes());
        }
        for i in 0..SAMPLES.min(names.len()) {
            let name = names[i * names.len() / SAMPLES.min(names.len())];
            hash = fnv::hash(hash, &self.checkpoint.read_middle(name, SAMPLE_BYTES).await?);
        }
        Ok(hash)
    }
}

/// The template and the name of its file; a file of its own comes before the tokenizer's settings.
async fn chat_template(
    source: &dyn Source,
    settings: Option<&Map<String, Value>>,
) -> Result<Option<(&'static str, String)>> {
    const JINJA: &str = "chat_template.jinja";
    const JSON: &str = "chat_template.json";
    if let Some(bytes) = read_small(source, JINJA, MAX_JSON).await? {
        let text =
            std::str::from_utf8(&bytes).map_err(|e| Error::model(source.path(JINJA), format!("not UTF-8: {e}")))?;
        return Ok(Some((JINJA, text.to_owned())));
    }
    if let Some(bytes) = read_small(source, JSON, MAX_JSON).await? {
        let object = parse_object(&source.path(JSON), &bytes)?;
        return Ok(template_text(source, JSON, object.get("chat_template"))?.map(|text| (JSON, text)));
    }
    let value = settings.and_then(|settings| settings.get("chat_template"));
    Ok(template_text(source, TOKENIZER_CONFIG, value)?.map(|text| (TOKENIZER_CONFIG, text)))
}

/// A template is a string, or a list of templates with names, of which `default` or else the first is for chats.
fn template_text(source: &dyn Source, file: &str, value: Option<&Value>) -> Result<Option<String>> {
    let text = match value {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::Array(list)) => {
            let default = list.iter().find(|t| t.get("name").and_then(Value::as_str) == Some("default"));
            default.or(list.first()).and_then(|t| t.get("template")).and_then(Value::as_str)
        }
        Some(value) => value.as_str(),
    };
    let why = "key `chat_template`: expected a string, or a list of objects with `name` and `template`";
    text.map(|text| Some(text.to_owned())).ok_or_else(|| Error::model(source.path(file), why))
}

#[cfg(test)]
#[path = "model_dir_tests.rs"]
mod tests;
