//! A model directory as a whole: its files, and the references between them.

use std::sync::{Arc, OnceLock};

use serde_json::{Map, Value};

use crate::{
    Error, Result,
    bundle::Identity,
    chat::{ChatTemplate, render::Renderer},
    checkpoint::{Checkpoint, Recipe},
    config::{Config, parse_object},
    digest::Digest,
    fnv,
    generation::GenerationConfig,
    gguf::Gguf,
    source::{Source, read_small},
    tokenizer::Tokenizer,
};

mod mlx;
mod recipe;
mod texts;

pub use texts::Texts;

const CONFIG: &str = "config.json";
const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// Limits in bytes on files that are read whole.
const MAX_JSON: u64 = 16 << 20;
const MAX_TOKENIZER: u64 = 256 << 20;
/// How many places of the weights go into the fingerprint, and how many bytes of each.
const SAMPLES: usize = 32;
const SAMPLE_BYTES: u64 = 256;

/// The contents of a model's files. Without a tokenizer, token ids still work.
pub struct ModelFiles {
    /// Name of the model: the last part of its path or URL.
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
    source: Arc<dyn Source>,
    /// The GGUF file that holds configuration and perhaps tokenizer.
    gguf: Option<String>,
    /// Set by their first calls.
    fingerprint: OnceLock<u64>,
    identity: OnceLock<Identity>,
}

impl ModelFiles {
    /// Reads all files but the tensors themselves. `now` gives the seconds since 1970 (UTC) for chat templates that print the
    /// date.
    ///
    /// # Errors
    /// [`Error::BadModel`] naming the file that is missing or wrong; those of the source.
    pub async fn open(source: Arc<dyn Source>, now: fn() -> u64) -> Result<Self> {
        if let Some(name) = gguf_name(&*source).await? {
            return Self::read_gguf(source, now, &name).await;
        }
        let checkpoint = Checkpoint::open(source.clone());
        Self::read(source, now, checkpoint).await
    }

    /// The same with random weights, plain or as a recipe says, see [`Checkpoint::random`]; only `config.json` has to be there.
    ///
    /// # Errors
    /// As for [`ModelFiles::open`].
    pub async fn open_random(
        source: Arc<dyn Source>,
        now: fn() -> u64,
        seed: u64,
        recipe: Option<Recipe>,
    ) -> Result<Self> {
        let checkpoint = match recipe {
            Some(recipe) => Checkpoint::random_coded(seed, recipe),
            None => Checkpoint::random(seed),
        };
        Self::read(source, now, std::future::ready(Ok(checkpoint))).await
    }

    /// A GGUF file. Tokenizer files in its folder replace the tokenizer that it contains; no other file of the folder is read.
    async fn read_gguf(source: Arc<dyn Source>, now: fn() -> u64, name: &str) -> Result<Self> {
        let gguf = Gguf::open(&*source, name).await?;
        let keys = gguf.config()?;
        let config_hash = fnv::hash(fnv::START, Value::Object(keys.clone()).to_string().as_bytes());
        let config = Config::from_keys(gguf.path(), keys);
        let mut settings = tokenizer_settings(&*source).await?;
        let tokenizer = match read_small(&*source, TOKENIZER, MAX_TOKENIZER).await? {
            Some(bytes) => Some(Tokenizer::new(&source.path(TOKENIZER), &bytes, settings.as_ref())?),
            None => match gguf.tokenizer()? {
                Some(own) => Some(Tokenizer::new(gguf.path(), &own.tokenizer, Some(settings.insert(own.settings)))?),
                None => None,
            },
        };
        let chat = match chat_template(&*source, settings.as_ref()).await? {
            Some((file, text)) => Some((source.path(file), text)),
            None => gguf.template().map(|text| (gguf.path().to_owned(), text.to_owned())),
        };
        let chat = chat.map(|(file, text)| Arc::new(ChatTemplate::new(&file, &text, now)));
        let checkpoint = Checkpoint::of_gguf(source.clone(), &gguf)?;
        let label = source.label();
        let (gguf, fingerprint, identity) = (Some(name.to_owned()), OnceLock::new(), OnceLock::new());
        let name = name.strip_suffix(".gguf").unwrap_or(name).to_owned();
        let tokenizer = tokenizer.map(Arc::new);
        let generation = GenerationConfig::default();
        Ok(Self {
            name,
            config,
            generation,
            tokenizer,
            chat,
            checkpoint,
            label,
            config_hash,
            source,
            gguf,
            fingerprint,
            identity,
        })
    }

    async fn read(
        source: Arc<dyn Source>,
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
        let mut config = Config::parse(&source.path(CONFIG), &bytes)?;
        let config_hash = fnv::hash(fnv::START, &bytes);
        let generation = match read_small(&*source, "generation_config.json", MAX_JSON).await? {
            Some(bytes) => GenerationConfig::parse(&source.path("generation_config.json"), &bytes)?,
            None => GenerationConfig::default(),
        };
        let settings = tokenizer_settings(&*source).await?;
        let tokenizer = match read_small(&*source, TOKENIZER, MAX_TOKENIZER).await? {
            Some(bytes) => Some(Arc::new(Tokenizer::new(&source.path(TOKENIZER), &bytes, settings.as_ref())?)),
            None => None,
        };
        let chat = chat_template(&*source, settings.as_ref()).await?;
        let chat = chat.map(|(file, text)| Arc::new(ChatTemplate::new(&source.path(file), &text, now)));
        let checkpoint = recipe::apply(&*source, &mut config, checkpoint.await?).await?;
        let name =
            label.rsplit(['/', '\\']).find(|part| !matches!(*part, "" | "." | "..")).unwrap_or("model").to_owned();
        let (gguf, fingerprint, identity) = (None, OnceLock::new(), OnceLock::new());
        Ok(Self {
            name,
            config,
            generation,
            tokenizer,
            chat,
            checkpoint,
            label,
            config_hash,
            source,
            gguf,
            fingerprint,
            identity,
        })
    }

    /// Has the chat template rendered by `renderer` from now on, see [`ChatTemplate::rendered_by`].
    pub fn render_with(&mut self, renderer: Arc<dyn Renderer>) {
        self.chat = self.chat.take().map(|chat| Arc::new(chat.rendered_by(renderer)));
    }

    /// Where the files came from, as shown in messages.
    pub fn label(&self) -> &str {
        &self.label
    }

    /// The tokenizer, for a model that must read or write text.
    ///
    /// # Errors
    /// [`Error::BadModel`] if there is none.
    pub fn tokenizer(&self) -> Result<&Arc<Tokenizer>> {
        let why = || format!("there is no {TOKENIZER}, so this model takes token ids only; add the file to use text");
        self.tokenizer.as_ref().ok_or_else(|| Error::model(&self.label, why()))
    }

    /// The chat template, for a model that must chat.
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

    /// A number that distinguishes models whose cached states must not be mixed. It covers the configuration, the
    /// names, shapes and dtypes of all tensors, and bytes from places spread over the weights. Equal files have equal
    /// fingerprints on every machine. Collisions can be constructed.
    ///
    /// # Errors
    /// Those of the source.
    pub async fn fingerprint(&self) -> Result<u64> {
        if let Some(known) = self.fingerprint.get() {
            return Ok(*known);
        }
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
        Ok(*self.fingerprint.get_or_init(|| hash))
    }
}

impl ModelFiles {
    /// Digests of everything that a state depends on. The first call reads all weights, so it takes as long as that; `report`
    /// gets the bytes read so far.
    ///
    /// # Errors
    /// Those of the source; [`Error::BadModel`] if a file has become another one since it was opened.
    pub async fn identity(&self, report: &mut dyn FnMut(u64)) -> Result<Identity> {
        if let Some(known) = self.identity.get() {
            return Ok(known.clone());
        }
        let file = async |name: &str, most: u64| read_small(&*self.source, name, most).await;
        let own = match &self.gguf {
            Some(name) => Some(Gguf::open(&*self.source, name).await?),
            None => None,
        };
        let config = match &own {
            Some(gguf) => Digest::of(Value::Object(gguf.config()?).to_string().as_bytes()),
            None => Digest::of(&file(CONFIG, MAX_JSON).await?.unwrap_or_else(|| Vec::new().into())),
        };
        let tokenizer = match (file(TOKENIZER, MAX_TOKENIZER).await?, &own) {
            (Some(bytes), _) => Digest::of(&bytes),
            (None, Some(gguf)) => Digest::of(&gguf.tokenizer()?.map(|own| own.tokenizer).unwrap_or_default()),
            (None, None) => Digest::of(&[]),
        };
        let identity = Identity { weights: self.checkpoint.digest(report).await?, config, tokenizer };
        Ok(self.identity.get_or_init(|| identity).clone())
    }
}

/// The GGUF file that is the model: one that a user named, or one in a folder without a configuration of its own.
async fn gguf_name(source: &dyn Source) -> Result<Option<String>> {
    match source.gguf() {
        Ok(Some(name)) if source.label() == source.path(&name) || source.size(CONFIG).await?.is_none() => {
            Ok(Some(name))
        }
        Err(several) if source.size(CONFIG).await?.is_none() => Err(several),
        _ => Ok(None),
    }
}

/// The object in `tokenizer_config.json`, if there is one.
async fn tokenizer_settings(source: &dyn Source) -> Result<Option<Map<String, Value>>> {
    let bytes = read_small(source, TOKENIZER_CONFIG, MAX_JSON).await?;
    bytes.map(|bytes| parse_object(&source.path(TOKENIZER_CONFIG), &bytes)).transpose()
}

/// The template and the name of its file. A separate file takes precedence over the tokenizer's settings.
async fn chat_template(
    source: &dyn Source,
    settings: Option<&Map<String, Value>>,
) -> Result<Option<(&'static str, String)>> {
    const JINJA: &str = "chat_template.jinja";
    const JSON: &str = "chat_template.json";
    if let Some(bytes) = read_small(source, JINJA, MAX_JSON).await? {
        let text = std::str::from_utf8(&bytes).map_err(|e| {
            Error::model(source.path(JINJA), format!("not UTF-8: {e}; correct the file, or download it again"))
        })?;
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
