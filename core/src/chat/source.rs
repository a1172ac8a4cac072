//! Sources of templates: checks before compilation, and rewriting.

/// Longest source in bytes; the longest published ones have some 30,000.
const MAX_BYTES: usize = 256 << 10;
/// Operators within one tag. The compiler goes one level deeper for each, and a whole chat template rarely has so many.
const MAX_OPERATORS: usize = 500;
/// `elif`s of a template; the compiler goes one level deeper for each that follows another.
const MAX_ELIFS: usize = 500;

/// The source for the compiler.
///
/// # Errors
/// A construct that could overflow the compiler's stack. The compiler itself limits other nesting.
pub(super) fn prepared(source: &str) -> Result<String, String> {
    if source.len() > MAX_BYTES {
        return Err(format!("it has {} bytes, more than the {MAX_BYTES} that a template may have", source.len()));
    }
    let mut elifs = 0;
    let mut rest = source;
    while let Some(start) = rest.find("{{").into_iter().chain(rest.find("{%")).min() {
        let line = || source[..source.len() - rest.len() + start].matches('\n').count() + 1;
        let tag = Tag::read(&rest[start..]);
        if tag.operators > MAX_OPERATORS {
            return Err(format!("the tag in line {} has more than {MAX_OPERATORS} operators", line()));
        }
        elifs += usize::from(tag.first_word == "elif");
        if elifs > MAX_ELIFS {
            return Err(format!("it has more than {MAX_ELIFS} `elif`s up to line {}", line()));
        }
        rest = &rest[start + tag.len..];
    }
    // Jinja reads every end of line as a line feed.
    Ok(without_generation_tags(&source.replace("\r\n", "\n").replace('\r', "\n")))
}

/// A tag, counted but not understood.
struct Tag<'a> {
    /// Bytes with both delimiters.
    len: usize,
    operators: usize,
    first_word: &'a str,
}

impl<'a> Tag<'a> {
    /// The tag that `text` begins with. It ends at its delimiter outside of strings and braces.
    fn read(text: &'a str) -> Self {
        let closing = if text.starts_with("{{") { '}' } else { '%' };
        let mut tag = Self { len: text.len(), operators: 0, first_word: "" };
        let mut braces = 0usize;
        let mut chars = text.char_indices().skip(2).peekable();
        while let Some((at, c)) = chars.next() {
            match c {
                '"' | '\'' => {
                    while let Some((_, inside)) = chars.next() {
                        match inside {
                            '\\' => drop(chars.next()),
                            end if end == c => break,
                            _ => {}
                        }
                    }
                }
                _ if c == closing && braces == 0 && chars.peek().is_some_and(|next| next.1 == '}') => {
                    tag.len = at + 2;
                    return tag;
                }
                '{' => braces += 1,
                '}' => braces = braces.saturating_sub(1),
                '+' | '-' | '*' | '/' | '%' | '~' | '|' | '.' | '[' | '(' | '<' | '>' | '=' | '!' => tag.operators += 1,
                _ if c.is_alphabetic() || c == '_' => {
                    let word = &text[at..];
                    let word = &word[..word.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(word.len())];
                    if tag.first_word.is_empty() {
                        tag.first_word = word;
                    }
                    tag.operators += usize::from(matches!(word, "not" | "and" | "or" | "if" | "else" | "is" | "in"));
                    for _ in word.chars().skip(1) {
                        chars.next();
                    }
                }
                _ => {}
            }
        }
        tag
    }
}

/// transformers marks the assistant's words with a block tag of its own, `generation`, which prints its contents.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let end = rest[start..].find("%}").map_or(rest.len(), |n| start + n + 2);
        let tag = &rest[start..end];
        let word = tag.trim_start_matches("{%").trim_end_matches("%}").trim_matches(['-', '+', ' ', '\n', '\t']);
        let replaced = match word {
            "generation" => tag.replacen("generation", "if true", 1),
            "endgeneration" => tag.replacen("endgeneration", "endif", 1),
            _ => tag.to_owned(),
        };
        out += &rest[..start];
        out += &replaced;
        rest = &rest[end..];
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_are_refused_and_long_lists_are_not() {
        for (unit, n) in [("+1", 501), ("|upper", 501), (".a", 501), (" and 1", 501), ("[0]", 501)] {
            let why = prepared(&format!("a\n{{{{ x{} }}}}", unit.repeat(n))).unwrap_err();
            assert!(why.contains("line 2") && why.contains("500 operators"), "{why}");
        }
        assert!(prepared(&format!("{{{{ {{'a': {{}}}} {} }}}}", "+1".repeat(501))).is_err());
        assert!(prepared(&format!("{{% if {}1 %}}{{% endif %}}", "not ".repeat(501))).is_err());
        assert!(prepared(&format!("{{{{ '{}' }}}}{}", "+".repeat(9999), "{{ a + b }}".repeat(9999))).is_ok());
        assert!(prepared(&format!("{{% set x = [{}] %}}", "'a', ".repeat(9999))).is_ok());
    }

    #[test]
    fn long_sources_and_many_branches_are_refused() {
        let branches = |n| format!("{{% if a %}}{}{{% endif %}}", "{%- elif b %}\n".repeat(n));
        assert!(prepared(&branches(500)).is_ok());
        assert!(prepared(&branches(501)).unwrap_err().contains("line 501"));
        assert!(prepared(&"x".repeat(MAX_BYTES)).is_ok());
        assert!(prepared(&"x".repeat(MAX_BYTES + 1)).unwrap_err().contains("262145 bytes"));
    }
}
