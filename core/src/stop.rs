//! Stop strings over streamed text.

use crate::{Error, Result};

/// Looks for stop strings in text that arrives in pieces. A possible beginning of one is held back.
#[derive(Clone, Debug)]
pub struct StopStrings {
    stops: Vec<String>,
    held: String,
}

impl StopStrings {
    /// # Errors
    /// [`Error::BadRequest`] for an empty string, which would stop everything.
    pub fn new(stops: Vec<String>) -> Result<Self> {
        if stops.iter().any(String::is_empty) {
            return Err(Error::BadRequest("a stop string is empty; leave it out".into()));
        }
        Ok(Self { stops, held: String::new() })
    }

    /// Takes the next piece of text. Returns the text that can be shown, and whether a stop string was found; the stop
    /// string and everything after it are dropped. The first one that is complete counts, of several the longest,
    /// however the text is cut.
    pub fn push(&mut self, text: &str) -> (String, bool) {
        for c in text.chars() {
            self.held.push(c);
            let complete = self.stops.iter().filter(|stop| self.held.ends_with(stop.as_str())).map(String::len).max();
            if let Some(length) = complete {
                let mut shown = std::mem::take(&mut self.held);
                shown.truncate(shown.len() - length);
                return (shown, true);
            }
        }
        let may_begin = |at: &usize| self.stops.iter().any(|stop| stop.starts_with(&self.held[*at..]));
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let from = self.held.len().saturating_sub(longest);
        let keep = self.held.char_indices().map(|(at, _)| at).filter(|at| *at >= from).find(may_begin);
        let keep = self.held.split_off(keep.unwrap_or(self.held.len()));
        (std::mem::replace(&mut self.held, keep), false)
    }

    /// The text ends, so the held-back text is not a stop string.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_stop_string_in_pieces_is_never_shown() {
        let mut stops = StopStrings::new(vec!["\nUser:".into(), "END".into()]).unwrap();
        assert_eq!(stops.push("hello\nUs"), ("hello".into(), false));
        assert_eq!(stops.push("e"), (String::new(), false));
        assert_eq!(stops.push("ful E"), ("\nUseful ".into(), false));
        assert_eq!(stops.push("ND more"), (String::new(), true));
        assert!(StopStrings::new(vec![String::new()]).is_err());
    }

    proptest! {
        /// However a text is cut, the result is that of searching the whole.
        #[test]
        fn cuts_do_not_matter(pieces in prop::collection::vec("[abé]{0,3}", 0..12), stops in prop::collection::vec("[abé]{1,4}", 0..3)) {
            let whole = pieces.concat();
            let ends = |at: &usize| stops.iter().filter(|s| whole[..*at].ends_with(s.as_str())).map(|s| at - s.len()).min();
            let want = (0..=whole.len()).filter(|at| whole.is_char_boundary(*at)).find_map(|at| ends(&at));
            let mut matcher = StopStrings::new(stops.clone()).unwrap();
            let mut shown = String::new();
            let mut stopped = false;
            for piece in &pieces {
                let (text, stop) = matcher.push(piece);
                shown += &text;
                if stop {
                    stopped = true;
                    break;
                }
            }
            if !stopped {
                shown += &matcher.finish();
            }
            let shown_all = want.unwrap_or(whole.len());
            prop_assert_eq!((shown.as_str(), stopped), (&whole[..shown_all], want.is_some()));
        }
    }
}
