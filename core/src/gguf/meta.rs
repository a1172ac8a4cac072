//! Keys of a GGUF file. Writers disagree on number types, and on scalars or an array with an entry per layer.

use std::collections::BTreeMap;

/// A value of a key.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A number or an array of them, as bytes of the file; a bool is a number.
    Numbers {
        /// The type's number in the file.
        kind: u32,
        /// Whether it is a scalar.
        one: bool,
        /// The elements.
        bytes: Vec<u8>,
    },
    /// A string; bytes that are no UTF-8 became U+FFFD.
    Text(String),
    /// An array of strings.
    Texts(Vec<String>),
}

impl Value {
    fn one(kind: u32, bytes: &[u8]) -> Self {
        Self::Numbers { kind, one: true, bytes: bytes.to_vec() }
    }

    fn list<const N: usize>(kind: u32, numbers: impl Iterator<Item = [u8; N]>) -> Self {
        Self::Numbers { kind, one: false, bytes: numbers.flatten().collect() }
    }

    /// An integer without sign, of 32 bits.
    pub fn u32(n: u32) -> Self {
        Self::one(4, &n.to_le_bytes())
    }

    /// A float of 32 bits.
    pub fn f32(x: f32) -> Self {
        Self::one(6, &x.to_le_bytes())
    }

    /// A switch.
    pub fn bool(b: bool) -> Self {
        Self::one(7, &[u8::from(b)])
    }

    /// A string.
    pub fn text(text: impl Into<String>) -> Self {
        Self::Text(text.into())
    }

    /// An array of integers without sign.
    pub fn u32s(numbers: &[u32]) -> Self {
        Self::list(4, numbers.iter().map(|n| n.to_le_bytes()))
    }

    /// An array of integers.
    pub fn i32s(numbers: &[i32]) -> Self {
        Self::list(5, numbers.iter().map(|n| n.to_le_bytes()))
    }

    /// An array of switches.
    pub fn bools(switches: &[bool]) -> Self {
        Self::list(7, switches.iter().map(|b| [u8::from(*b)]))
    }
}

/// Bytes of a number of a type.
pub(super) fn number_size(kind: u32) -> Option<usize> {
    Some(match kind {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        10..=12 => 8,
        _ => return None,
    })
}

/// All keys of a file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Meta {
    values: BTreeMap<String, Value>,
}

impl Meta {
    pub(super) fn new(values: BTreeMap<String, Value>) -> Self {
        Self { values }
    }

    /// Sets a key.
    pub fn set(&mut self, key: impl Into<String>, value: Value) {
        self.values.insert(key.into(), value);
    }

    /// All keys with their values, in alphabetical order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&String, &Value)> {
        self.values.iter()
    }

    /// Removes the keys for which `keep` is false.
    pub fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        self.values.retain(|key, _| keep(key));
    }

    /// Whether a key is there.
    pub fn has(&self, key: &str) -> bool {
        self.values.contains_key(key)
    }

    /// The numbers of a key, one of a scalar.
    pub fn numbers(&self, key: &str) -> Option<Vec<f64>> {
        self.read(key, false, |kind, b| match kind {
            6 => f32::from_le_bytes(b[..4].try_into().expect("4 bytes")).into(),
            12 => f64::from_le_bytes(b.try_into().expect("8 bytes")),
            _ => integer(kind, b) as f64,
        })
    }

    /// The integers of a key, one of a scalar.
    pub fn ints(&self, key: &str) -> Option<Vec<i64>> {
        match self.values.get(key)? {
            Value::Numbers { kind: 6 | 12, .. } => None,
            _ => self.read(key, false, integer),
        }
    }

    /// An integer.
    pub fn int(&self, key: &str) -> Option<i64> {
        match self.values.get(key)? {
            Value::Numbers { kind: 6 | 12, .. } => None,
            _ => self.read(key, true, integer)?.pop(),
        }
    }

    /// A number.
    pub fn float(&self, key: &str) -> Option<f64> {
        match self.values.get(key)? {
            Value::Numbers { one: true, .. } => self.numbers(key)?.pop(),
            _ => None,
        }
    }

    /// A switch.
    pub fn bool(&self, key: &str) -> Option<bool> {
        self.int(key).map(|n| n != 0)
    }

    /// A string.
    pub fn text(&self, key: &str) -> Option<&str> {
        match self.values.get(key)? {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    /// An array of strings.
    pub fn texts(&self, key: &str) -> Option<&[String]> {
        match self.values.get(key)? {
            Value::Texts(texts) => Some(texts),
            _ => None,
        }
    }

    fn read<T>(&self, key: &str, scalar: bool, number: impl Fn(u32, &[u8]) -> T) -> Option<Vec<T>> {
        let Value::Numbers { kind, one, bytes } = self.values.get(key)? else { return None };
        if scalar && !one {
            return None;
        }
        Some(bytes.chunks_exact(number_size(*kind)?).map(|b| number(*kind, b)).collect())
    }
}

/// An integer or a bool of any type; what does not fit is the largest number.
fn integer(kind: u32, b: &[u8]) -> i64 {
    let mut wide = [0; 8];
    wide[..b.len()].copy_from_slice(b);
    let (bits, unsigned) = (64 - 8 * b.len() as u32, u64::from_le_bytes(wide));
    match kind {
        1 | 3 | 5 | 11 => ((unsigned << bits) as i64) >> bits,
        7 => i64::from(unsigned != 0),
        _ => i64::try_from(unsigned).unwrap_or(i64::MAX),
    }
}
