//! The files of text as they are, for copies of a model.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::{MAX_TOKENIZER, ModelFiles, TOKENIZER, chat_template, tokenizer_settings};
use crate::{
    Result,
    source::{Source, read_small},
};

/// Tokenizer and chat template of a folder.
#[derive(Debug)]
pub struct Texts {
    /// `tokenizer.json`, if there is one.
    pub tokenizer: Option<Vec<u8>>,
    /// The keys of `tokenizer_config.json`.
    pub settings: Map<String, Value>,
    /// The chat template, if there is one.
    pub template: Option<String>,
}

impl ModelFiles {
    /// Where the files are.
    pub fn source(&self) -> &Arc<dyn Source> {
        &self.source
    }

    /// The GGUF file that is the model, if it is one.
    pub fn gguf(&self) -> Option<&str> {
        self.gguf.as_deref()
    }

    /// The files of text, read again.
    ///
    /// # Errors
    /// [`crate::Error::BadModel`] if a file is damaged; those of the source.
    pub async fn texts(&self) -> Result<Texts> {
        let settings = tokenizer_settings(&*self.source).await?;
        let template = chat_template(&*self.source, settings.as_ref()).await?.map(|(_, text)| text);
        let tokenizer = read_small(&*self.source, TOKENIZER, MAX_TOKENIZER).await?.map(|bytes| bytes.to_vec());
        Ok(Texts { tokenizer, settings: settings.unwrap_or_default(), template })
    }
}
