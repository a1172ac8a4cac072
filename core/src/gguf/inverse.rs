//! The rules of an architecture the other way round: which rows of a family's weights make the tensors of a file.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Change, Meta,
    arch::{self, Facts, How, Rule},
    rows_of,
};
use crate::{Error, Result};

/// A tensor of a file that is made of rows of one weight.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// Its name in the file.
    pub name: String,
    /// The weight, by the family's name.
    pub weight: String,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// Rows of the weight in the order of the file, the same in each of the outer dimensions. Of a vector, its elements.
    pub rows: Vec<usize>,
    /// Columns of the weight in the order of the file, if it is another one.
    pub columns: Option<Vec<usize>>,
    /// What has to be undone on its elements.
    pub change: Change,
}

/// The tensors of a file with these keys. `shape` gives the shape of a weight by the family's name, without sizes of 1; `None` if
/// there is no such weight. A weight that the architecture does not know is in no tensor.
///
/// # Errors
/// [`Error::Unsupported`] for an unknown architecture, [`Error::BadModel`] naming a weight whose rows do not fit its rule.
pub fn parts(path: &str, meta: &Meta, shape: &dyn Fn(&str) -> Option<Vec<usize>>) -> Result<Vec<Part>> {
    let name = meta.text("general.architecture").unwrap_or_default();
    let none = BTreeMap::new();
    let facts = Facts { path, arch: name, meta, tensors: &none, rope_factors: None, own_order: true };
    let (rules, layers) = ((arch::find(path, name)?.rules)(&facts)?, facts.layers()?);
    let mut done = BTreeSet::new();
    let mut parts = Vec::new();
    for layer in [None].into_iter().chain((0..layers).map(Some)) {
        for rule in rules.iter().filter(|rule| rule.sources[0].contains("{}") == layer.is_some()) {
            let fill = |name: &str| layer.map_or(name.to_owned(), |i| name.replace("{}", &i.to_string()));
            let weight = fill(&rule.name);
            // The first rule of a weight is the form in which it is written.
            let Some(shape) = shape(&weight).filter(|_| done.insert(weight.clone())) else { continue };
            let made = undo(rule, &shape).map_err(|why| Error::model(path, format!("tensor `{weight}`: {why}")))?;
            for (source, part) in rule.sources.iter().zip(made) {
                parts.push(Part { name: fill(source), weight: weight.clone(), ..part });
            }
        }
    }
    Ok(parts)
}

/// The sources of a weight of that shape, without names.
fn undo(rule: &Rule, shape: &[usize]) -> Result<Vec<Part>, String> {
    let n = rows_of(shape);
    let sources = rule.sources.len();
    if rule.how == How::Join && !n.is_multiple_of(sources) {
        return Err(format!("{n} rows are not those of {sources} equal parts"));
    }
    let counts = rule.how.rows(n, sources);
    let mut rows: Vec<Vec<Option<usize>>> = counts.iter().map(|count| vec![None; *count]).collect();
    let places = rule.how.picks(&counts)?.into_iter().flat_map(|p| (0..p.count).map(move |i| (p, i)));
    let mut taken = 0;
    for (at, (pick, i)) in places.enumerate() {
        let place = &mut rows[pick.source][pick.first + i * pick.step];
        if place.replace(at).is_some() {
            return Err("a row of the file would stand for several".into());
        }
        taken += 1;
    }
    if taken != n {
        return Err(format!("it has {n} rows, but {taken} are expected"));
    }
    let columns = match &rule.how {
        How::Columns(columns) if Some(&columns.len()) != shape.last() => {
            return Err(format!("{} columns are expected", columns.len()));
        }
        How::Columns(columns) => Some(columns.clone()),
        _ => None,
    };
    let part = |rows: Vec<Option<usize>>| {
        let rows = rows.into_iter().collect::<Option<Vec<_>>>().ok_or("a row of the file would stand for none")?;
        let mut shape = shape.to_vec();
        match rule.how {
            How::Flat(width) if width > 0 && shape.len() == 1 && shape[0].is_multiple_of(width) => {
                shape = vec![shape[0] / width, width];
            }
            _ => {
                let axis = shape.len().saturating_sub(2);
                shape[axis] = rows.len();
            }
        }
        let (name, weight) = Default::default();
        Ok(Part { name, weight, shape, rows, columns: columns.clone(), change: rule.change })
    };
    rows.into_iter().map(part).collect()
}
