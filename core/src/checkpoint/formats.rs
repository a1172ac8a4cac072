//! What the tensors of a checkpoint are stored as.

use std::collections::BTreeMap;

use super::{Checkpoint, Kind, TensorInfo, header::known_dtype};
use crate::format::Format;

impl TensorInfo {
    /// The tensors that have its rows: others, or it alone.
    pub(super) fn sources(&self) -> &[Self] {
        self.joined.as_deref().map_or(std::slice::from_ref(self), Vec::as_slice)
    }
}

impl Checkpoint {
    fn sources(&self) -> impl Iterator<Item = &TensorInfo> {
        self.names().filter_map(|name| self.info(name)).flat_map(TensorInfo::sources)
    }

    /// Whether a weight is stored in codes.
    pub fn is_coded(&self) -> bool {
        if let Kind::Random { recipe, .. } = self.kind {
            return recipe.is_some();
        }
        let sources = |info: &TensorInfo| match &info.made {
            Some(made) => made.rows.iter().any(|r| r.from.format.is_some_and(|(format, _)| format != Format::Plain)),
            None => info.scaled.is_some(),
        };
        self.sources().any(sources)
    }

    /// Whether a tensor has elements that are neither floats nor codes that are read.
    pub fn holds_unknown_codes(&self) -> bool {
        let plain =
            |info: &TensorInfo| info.made.is_some() || info.scaled.is_some() || known_dtype(&info.dtype).is_some();
        let other = |info: &TensorInfo| !plain(info) && !["F64", "I64", "BOOL"].contains(&info.dtype.as_str());
        self.sources().any(other)
    }

    /// Whether the recipe of some matrix rounds the input of products with it, see [`crate::ops::Round`].
    pub fn rounds_activations(&self) -> bool {
        self.names().any(|name| self.info(name).is_some_and(|info| self.rounds(name, &info.shape)))
    }

    /// Bytes of all stored tensors.
    pub fn bytes(&self) -> u64 {
        self.names().filter_map(|name| self.info(name)).map(TensorInfo::bytes).sum()
    }

    /// What the tensors are stored as: type, bytes, and whether they are brought into another form when they are read.
    pub fn formats(&self) -> BTreeMap<&str, (u64, bool)> {
        let mut formats = BTreeMap::new();
        for info in self.sources() {
            let (bytes, _) = formats.entry(info.dtype.as_str()).or_insert((0, info.scaled.is_some()));
            *bytes += info.bytes();
        }
        formats
    }
}
