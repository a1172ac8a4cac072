//! A writer of GGUF files, in memory.

use std::collections::BTreeMap;

/// A value of a key.
#[derive(Clone, Debug)]
pub enum Value {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    U32s(Vec<u32>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
    Texts(Vec<String>),
}

impl From<usize> for Value {
    fn from(n: usize) -> Self {
        Self::U32(n as u32)
    }
}

impl From<f64> for Value {
    fn from(x: f64) -> Self {
        Self::F32(x as f32)
    }
}

impl From<bool> for Value {
    fn from(b: bool) -> Self {
        Self::Bool(b)
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.into())
    }
}

impl From<Vec<usize>> for Value {
    fn from(list: Vec<usize>) -> Self {
        Self::U32s(list.into_iter().map(|n| n as u32).collect())
    }
}

/// Numbers of types in the file.
pub const F32: u32 = 0;

/// A file under way.
#[derive(Clone, Debug, Default)]
pub struct Writer {
    pub keys: Vec<(String, Value)>,
    /// Sizes (outermost first), type and bytes.
    pub tensors: BTreeMap<String, (Vec<usize>, u32, Vec<u8>)>,
}

pub fn text(to: &mut Vec<u8>, text: &str) {
    to.extend((text.len() as u64).to_le_bytes());
    to.extend(text.as_bytes());
}

impl Value {
    fn write(&self, to: &mut Vec<u8>) {
        let kind = |to: &mut Vec<u8>, n: u32| to.extend(n.to_le_bytes());
        let list = |to: &mut Vec<u8>, of: u32, n: usize| {
            to.extend(9u32.to_le_bytes());
            to.extend(of.to_le_bytes());
            to.extend((n as u64).to_le_bytes());
        };
        match self {
            Self::U32(n) => {
                kind(to, 4);
                to.extend(n.to_le_bytes());
            }
            Self::F32(x) => {
                kind(to, 6);
                to.extend(x.to_le_bytes());
            }
            Self::Bool(b) => {
                kind(to, 7);
                to.push(u8::from(*b));
            }
            Self::Text(t) => {
                kind(to, 8);
                text(to, t);
            }
            Self::U32s(l) => {
                list(to, 4, l.len());
                l.iter().for_each(|n| to.extend(n.to_le_bytes()));
            }
            Self::I32s(l) => {
                list(to, 5, l.len());
                l.iter().for_each(|n| to.extend(n.to_le_bytes()));
            }
            Self::F32s(l) => {
                list(to, 6, l.len());
                l.iter().for_each(|n| to.extend(n.to_le_bytes()));
            }
            Self::Texts(l) => {
                list(to, 8, l.len());
                l.iter().for_each(|t| text(to, t));
            }
        }
    }
}

impl Writer {
    pub fn new(architecture: &str) -> Self {
        let mut new = Self::default();
        new.key("general.architecture", architecture);
        new
    }

    pub fn key(&mut self, key: &str, value: impl Into<Value>) {
        self.keys.push((key.into(), value.into()));
    }

    pub fn f32(&mut self, name: impl Into<String>, shape: &[usize], values: &[f32]) {
        assert_eq!(shape.iter().product::<usize>(), values.len());
        let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.tensors.insert(name.into(), (shape.to_vec(), F32, bytes));
    }

    /// The file; its tensors begin at multiples of 32 in the data.
    pub fn bytes(&self) -> Vec<u8> {
        self.part(&self.keys, self.tensors.iter())
    }

    fn part<'a>(
        &self,
        keys: &[(String, Value)],
        tensors: impl Iterator<Item = (&'a String, &'a (Vec<usize>, u32, Vec<u8>))> + Clone,
    ) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((tensors.clone().count() as u64).to_le_bytes());
        out.extend((keys.len() as u64).to_le_bytes());
        for (key, value) in keys {
            text(&mut out, key);
            value.write(&mut out);
        }
        let mut at = 0usize;
        for (name, (shape, kind, bytes)) in tensors.clone() {
            text(&mut out, name);
            out.extend((shape.len() as u32).to_le_bytes());
            shape.iter().rev().for_each(|n| out.extend((*n as u64).to_le_bytes()));
            out.extend(kind.to_le_bytes());
            out.extend((at as u64).to_le_bytes());
            at += bytes.len().next_multiple_of(32);
        }
        for (_, (.., bytes)) in tensors {
            out.resize(out.len().next_multiple_of(32), 0);
            out.extend(bytes);
        }
        out.resize(out.len().next_multiple_of(32), 0);
        out
    }

    /// The same in several files, by name.
    pub fn split(&self, stem: &str, files: usize) -> Vec<(String, Vec<u8>)> {
        let per_file = self.tensors.len().div_ceil(files);
        let one = |i: usize| {
            let mut keys = if i == 0 { self.keys.clone() } else { Vec::new() };
            keys.push(("split.no".into(), i.into()));
            keys.push(("split.count".into(), files.into()));
            keys.push(("split.tensors.count".into(), self.tensors.len().into()));
            let name = format!("{stem}-{:05}-of-{files:05}.gguf", i + 1);
            (name, self.part(&keys, self.tensors.iter().skip(i * per_file).take(per_file)))
        };
        (0..files).map(one).collect()
    }
}
