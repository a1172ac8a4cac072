//! Line breaks between words, for text that comes in pieces.

use unicode_width::UnicodeWidthChar;

/// Breaks lines at spaces. A word is written once it is complete, so that nothing has to be taken back. Fenced code is left as it
/// is, because it is copied from the terminal.
#[derive(Default)]
pub struct Wrap {
    /// Columns that the line takes so far.
    column: usize,
    /// Spaces after the last word; they go if the next word begins a line.
    spaces: usize,
    /// The word that is not complete, and its columns.
    word: String,
    columns: usize,
    /// The first characters of the line.
    start: String,
    code: bool,
}

const FENCE: &str = "```";

impl Wrap {
    /// The part of the text so far, `text` included, that can be written on a terminal with `width` columns.
    pub fn push(&mut self, text: &str, width: usize) -> String {
        let mut out = String::with_capacity(text.len() + 2);
        for c in text.chars() {
            if c != '\n' && self.start.len() < FENCE.len() {
                self.start.push(c);
            }
            match c {
                '\n' => {
                    self.end_word(&mut out, width);
                    self.code ^= self.start == FENCE;
                    self.start.clear();
                    (self.column, self.spaces) = (0, 0);
                    out.push('\n');
                }
                ' ' => {
                    self.end_word(&mut out, width);
                    self.spaces += 1;
                }
                c => {
                    self.word.push(c);
                    let columns = c.width().unwrap_or(1);
                    self.columns += columns;
                    // Lines of wide characters may break after any of them, and a word may be as long as a line.
                    if columns > 1 || self.code || self.columns >= width {
                        self.end_word(&mut out, width);
                    }
                }
            }
        }
        out
    }

    /// The rest. The next text begins a line.
    pub fn finish(&mut self, width: usize) -> String {
        let mut out = String::new();
        self.end_word(&mut out, width);
        *self = Self::default();
        out
    }

    fn end_word(&mut self, out: &mut String, width: usize) {
        if self.word.is_empty() {
            return;
        }
        if !self.code && self.column > 0 && self.column + self.spaces + self.columns > width {
            out.push('\n');
            self.column = 0;
        } else {
            out.extend(std::iter::repeat_n(' ', self.spaces));
            self.column += self.spaces;
        }
        *out += &self.word;
        self.column += self.columns;
        (self.spaces, self.columns) = (0, 0);
        self.word.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text in pieces of `n` characters, broken at 12 columns.
    fn broken(text: &str, n: usize) -> String {
        let mut wrap = Wrap::default();
        let chars: Vec<char> = text.chars().collect();
        let out: String = chars.chunks(n).map(|piece| wrap.push(&piece.iter().collect::<String>(), 12)).collect();
        out + &wrap.finish(12)
    }

    #[test]
    fn lines_break_between_words_however_the_text_comes() {
        for (text, want) in [
            ("the storm came at night", "the storm\ncame at\nnight"),
            ("a\n\n  indented line here", "a\n\n  indented\nline here"),
            ("short", "short"),
            ("twelve chars", "twelve chars"),
            ("an-unbreakable-word of it", "an-unbreakab\nle-word of\nit"),
            ("狐狸和灯笼的故事", "狐狸和灯笼的\n故事"),
            (
                "```\nlet x = a_long_line(of, code);\n```\nand then prose",
                "```\nlet x = a_long_line(of, code);\n```\nand then\nprose",
            ),
        ] {
            for n in [1, 2, 3, 100] {
                assert_eq!(broken(text, n), want, "pieces of {n}");
            }
        }
    }

    #[test]
    fn a_complete_word_does_not_wait() {
        let mut wrap = Wrap::default();
        assert_eq!(wrap.push("one tw", 80), "one");
        assert_eq!(wrap.push("o ", 80), " two");
        assert_eq!(wrap.push("three", 80), "");
        assert_eq!(wrap.finish(80), " three");
        assert_eq!(wrap.push("new ", 80), "new");
    }
}
