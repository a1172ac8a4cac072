//! Answers taken apart while they are generated: content, reasoning and tool calls.
//!
//! A [`Parser`] takes an answer in pieces, cut anywhere between two characters, and returns [`Event`]s. It reads every
//! character once, and holds back only what may still become a mark (`<tool_call>`), white space before one, and the
//! beginning of a call whose name is not known yet. A [`Format`] says how a family of models writes calls and reasoning.
//!
//! # What is a call
//! - A call is reported when its name and the beginning of its arguments are known. Text that turns out not to be a call
//!   before that is content, unchanged. After that it is [`Event::CallBroken`] with the call's whole source, so that a
//!   caller who has not shown the call yet can show the source as content instead, as vLLM does.
//! - Arguments are JSON text. JSON is passed on as the model wrote it, but for control characters in strings, which are
//!   escaped. Parameters in XML are typed by the tool's schema, Python's literals are translated.
//! - A missing closing tag is forgiven: the next call or the end of the answer closes a complete call.
//! - White space between content, reasoning and calls belongs to none of them.
//! - A call inside of reasoning ends the reasoning.

mod format;
mod json;
mod kimi;
mod python;
mod schema;
mod text;
mod xml;

use serde::Serialize;

use self::{
    format::{Mark, Marks},
    json::JsonCall,
    kimi::KimiCall,
    python::PythonCall,
    xml::XmlCall,
};

pub use self::{
    format::{CallFormat, Format, Reasoning},
    schema::Tools,
};

/// News of an answer. Texts are never empty.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub enum Event {
    /// More of the text that is meant for the user.
    Content(String),
    /// More of the reasoning.
    Reasoning(String),
    /// A call begins.
    CallStarted {
        /// Number of the call in this answer, from 0 on.
        index: usize,
        /// Its id: the model's own if its format has ids, otherwise the parser's prefix and the index.
        id: String,
        /// The tool.
        name: String,
    },
    /// More of the arguments of a call.
    Arguments {
        /// The call.
        index: usize,
        /// A part of their JSON text.
        text: String,
    },
    /// A call is complete; its arguments are a JSON object.
    CallEnded {
        /// The call.
        index: usize,
    },
    /// What began as a call is none: the answer ended within it, or it breaks the format.
    CallBroken {
        /// The call.
        index: usize,
        /// Its source in the answer.
        text: String,
    },
}

/// How an answer begins and how its calls are named.
#[derive(Clone, Debug, Default)]
pub struct Start {
    /// The prompt ends within reasoning, see [`Format::opens_reasoning`].
    pub in_reasoning: bool,
    /// If the answer has no content and no calls, its reasoning is its content: for requests that turned reasoning off
    /// (Nemotron writes such answers).
    pub content_required: bool,
    /// Prefix of the ids of calls.
    pub ids: String,
}

/// Takes one answer apart.
pub struct Parser {
    marks: Marks,
    tools: Tools,
    state: State,
    /// Characters that may be the beginning of a mark.
    held: String,
    /// White space after text; shown only if text follows.
    gap: String,
    /// Since the beginning or the last block there was only white space: reasoning may begin here.
    edge: bool,
    /// White space here separates blocks.
    after_block: bool,
    /// A block of calls began within reasoning.
    block_in_reasoning: bool,
    /// The calls are items of a list.
    list: bool,
    /// All reasoning, if it may have to become content.
    reasoning: Option<String>,
    /// Content or a call was reported.
    said: bool,
    out: Out,
}

enum State {
    Content,
    Reasoning,
    /// In a block of calls, before the next one.
    Before,
    /// In a block, after a call.
    After,
    Json(JsonCall),
    Xml(XmlCall),
    Python(PythonCall),
    Kimi(KimiCall),
}

/// A unit of an answer.
#[derive(Clone, Copy)]
enum Piece {
    Char(char),
    Mark(Mark),
}

/// The text is not what the format allows here.
struct NotACall;

/// What became of a piece in a call.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Progress {
    More,
    /// The call is complete.
    Whole,
}

impl Parser {
    /// A parser for one answer to a request with these tools; without any, nothing is a call.
    pub fn new(format: &Format, tools: Tools, start: Start) -> Self {
        let calls = format.calls.filter(|_| !tools.is_empty());
        let marks = Marks::new(calls, format.reasoning);
        let in_reasoning = start.in_reasoning && format.reasoning.is_some();
        Self {
            marks,
            tools,
            state: if in_reasoning { State::Reasoning } else { State::Content },
            held: String::new(),
            gap: String::new(),
            edge: true,
            after_block: in_reasoning,
            block_in_reasoning: false,
            list: false,
            reasoning: start.content_required.then(String::new),
            said: false,
            out: Out { ids: start.ids, ..Out::default() },
        }
    }

    /// Whether the answer is within reasoning, as far as it was pushed.
    pub fn in_reasoning(&self) -> bool {
        matches!(self.state, State::Reasoning)
    }

    /// Takes the next part of the answer.
    pub fn push(&mut self, text: &str) -> Vec<Event> {
        let mut rest = text;
        while !rest.is_empty() {
            if self.held.is_empty() && matches!(self.state, State::Content | State::Reasoning) {
                let run = rest.find(|c| self.marks.begins(c)).unwrap_or(rest.len());
                self.text(&rest[..run]);
                rest = &rest[run..];
            }
            let Some(c) = rest.chars().next() else { break };
            rest = &rest[c.len_utf8()..];
            self.held.push(c);
            self.advance(false);
        }
        self.take()
    }

    /// Takes a special token with this text. One that is no mark of the format has no text.
    pub fn push_special(&mut self, token: &str) -> Vec<Event> {
        self.advance(true);
        if let Some(mark) = self.marks.find(token) {
            if !self.marks.is_expected(mark, &self.state) {
                self.break_off();
            }
            if self.marks.is_expected(mark, &self.state) {
                self.piece(Piece::Mark(mark));
            }
        }
        self.take()
    }

    /// The end of the answer.
    pub fn finish(&mut self) -> Vec<Event> {
        self.advance(true);
        if let State::Xml(call) = &mut self.state
            && call.finish(&mut self.out)
        {
            self.state = State::After;
        }
        self.break_off();
        if matches!(self.state, State::Content) && !self.after_block {
            let gap = std::mem::take(&mut self.gap);
            self.out.text(&gap, false);
        }
        if let Some(reasoning) = self.reasoning.take().filter(|_| !self.said) {
            self.out.text(&reasoning, false);
        }
        self.take()
    }

    fn take(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.out.events)
    }

    /// Handles the characters held, as far as they are no beginning of a mark; with `all` even then.
    fn advance(&mut self, all: bool) {
        while !self.held.is_empty() {
            let piece = match self.marks.first(&self.held, &self.state) {
                format::Found::Mark(mark) => {
                    self.held.drain(..self.marks.text(mark).len());
                    Piece::Mark(mark)
                }
                format::Found::Beginning if !all => return,
                _ => Piece::Char(self.held.remove(0)),
            };
            self.piece(piece);
        }
    }

    fn piece(&mut self, piece: Piece) {
        match &mut self.state {
            State::Content | State::Reasoning => self.outside(piece),
            State::Before => self.before(piece),
            State::After => self.after(piece),
            State::Json(_) | State::Xml(_) | State::Python(_) | State::Kimi(_) => self.inside(piece),
        }
    }

    /// A piece of content or reasoning.
    fn outside(&mut self, piece: Piece) {
        let mark = match piece {
            Piece::Char(c) => return self.text(c.encode_utf8(&mut [0; 4])),
            Piece::Mark(mark) => mark,
        };
        let in_reasoning = self.in_reasoning();
        match mark {
            // Written again after the prompt or the model wrote it.
            Mark::ReasoningOpen(_) if in_reasoning && self.after_block => {}
            Mark::ReasoningClose(_) if !in_reasoning && self.edge => self.block_ends(State::Content),
            Mark::ReasoningOpen(_) if !in_reasoning && self.edge => self.block_ends(State::Reasoning),
            Mark::ReasoningClose(_) if in_reasoning => self.block_ends(State::Content),
            Mark::ReasoningOpen(_) | Mark::ReasoningClose(_) => self.text(self.marks.text(mark)),
            _ => {
                self.block_in_reasoning = in_reasoning;
                self.list = false;
                self.out.raw = std::mem::take(&mut self.gap);
                self.state = State::Before;
                match mark {
                    Mark::CallsOpen => self.out.raw += self.marks.text(mark),
                    _ => self.before(piece),
                }
                if let State::Xml(call) = &mut self.state {
                    call.bare = true;
                }
            }
        }
    }

    /// Text of content or reasoning.
    fn text(&mut self, text: &str) {
        let text = if self.after_block { text.trim_start() } else { text };
        let end = text.trim_end().len();
        if end > 0 {
            let reasoning = self.in_reasoning();
            let gap = std::mem::take(&mut self.gap);
            for part in [&gap, &text[..end]] {
                self.out.text(part, reasoning);
                if let Some(all) = self.reasoning.as_mut().filter(|_| reasoning) {
                    *all += part;
                }
            }
            self.said |= !reasoning;
            (self.edge, self.after_block) = (false, false);
        }
        self.gap += &text[end..];
    }

    fn block_ends(&mut self, next: State) {
        self.gap.clear();
        (self.edge, self.after_block) = (true, true);
        self.state = next;
    }

    /// A piece of a block before a call.
    fn before(&mut self, piece: Piece) {
        let state = match piece {
            Piece::Char(c) if c.is_whitespace() => None,
            Piece::Char('[') if !self.list && !self.marks.is_kimi() => {
                self.list = true;
                None
            }
            Piece::Char('{') if !self.marks.is_kimi() => Some(State::Json(JsonCall::default())),
            Piece::Char(c) if self.marks.is_python() && python::begins_name(c) => {
                let mut call = PythonCall::default();
                call.begin(c);
                Some(State::Python(call))
            }
            Piece::Mark(Mark::Function) => Some(State::Xml(XmlCall::default())),
            Piece::Mark(Mark::KimiCall) => Some(State::Kimi(KimiCall::default())),
            _ => {
                self.break_off();
                return self.again(piece);
            }
        };
        self.out.raw(piece, &self.marks);
        if let Some(state) = state {
            self.state = state;
        }
    }

    /// A piece of a block after a call.
    fn after(&mut self, piece: Piece) {
        match piece {
            Piece::Char(c) if c.is_whitespace() => {}
            Piece::Char(',') if self.list => {
                self.out.raw.push(',');
                self.state = State::Before;
            }
            Piece::Char(']') if self.list => self.list = false,
            Piece::Char('{') if !self.list && !self.marks.is_kimi() => self.before(piece),
            Piece::Mark(Mark::CallsOpen) => {
                self.list = false;
                self.out.raw += self.marks.text(Mark::CallsOpen);
                self.state = State::Before;
            }
            Piece::Mark(Mark::Function | Mark::KimiCall) => self.before(piece),
            Piece::Mark(Mark::KimiEnd) => {}
            Piece::Mark(_) => self.block_ends(State::Content),
            Piece::Char(_) => {
                self.block_ends(State::Content);
                self.again(piece);
            }
        }
    }

    /// A piece of a call.
    fn inside(&mut self, piece: Piece) {
        let (tools, out) = (&self.tools, &mut self.out);
        let result = match (&mut self.state, piece) {
            (State::Json(call), Piece::Char(c)) => call.step(c, out),
            (State::Python(call), Piece::Char(c)) => call.step(c, out),
            (State::Xml(call), piece) => call.step(piece, tools, out),
            (State::Kimi(call), piece) => call.step(piece, out),
            _ => Err(NotACall),
        };
        self.said |= self.out.open.is_some();
        match result {
            Ok(Progress::More) => self.out.raw(piece, &self.marks),
            Ok(Progress::Whole) => {
                self.out.end();
                self.block_in_reasoning = false;
                self.state = State::After;
            }
            Err(NotACall) => {
                self.break_off();
                self.again(piece);
            }
        }
    }

    /// Handles a piece that the last state could not use.
    fn again(&mut self, piece: Piece) {
        match piece {
            Piece::Char(c) => self.held.insert(0, c),
            Piece::Mark(mark) => self.held.insert_str(0, self.marks.text(mark)),
        }
    }

    /// Ends a block; an incomplete call in it becomes content.
    fn break_off(&mut self) {
        if matches!(self.state, State::Content | State::Reasoning) {
            return;
        }
        let raw = std::mem::take(&mut self.out.raw);
        if let Some(index) = self.out.open.take() {
            self.out.events.push(Event::CallBroken { index, text: raw });
            (self.edge, self.after_block) = (false, false);
            self.state = State::Content;
        } else if raw.is_empty() {
            self.block_ends(State::Content);
        } else {
            self.state = if self.block_in_reasoning { State::Reasoning } else { State::Content };
            self.text(&raw);
        }
    }
}

/// Events, and the source of the call that is being read.
#[derive(Default)]
struct Out {
    events: Vec<Event>,
    ids: String,
    /// Calls that were started.
    calls: usize,
    /// The started call that is not complete.
    open: Option<usize>,
    /// Source since the end of the last call, or since the beginning of the block with the white space before it.
    raw: String,
}

impl Out {
    fn text(&mut self, text: &str, reasoning: bool) {
        if text.is_empty() {
            return;
        }
        match self.events.last_mut() {
            Some(Event::Content(last)) if !reasoning => *last += text,
            Some(Event::Reasoning(last)) if reasoning => *last += text,
            _ if reasoning => self.events.push(Event::Reasoning(text.into())),
            _ => self.events.push(Event::Content(text.into())),
        }
    }

    fn raw(&mut self, piece: Piece, marks: &Marks) {
        match piece {
            Piece::Char(c) => self.raw.push(c),
            Piece::Mark(mark) => self.raw += marks.text(mark),
        }
    }

    fn start(&mut self, name: &str, id: Option<&str>) {
        let index = self.calls;
        let id = id.map_or_else(|| format!("{}{index}", self.ids), str::to_owned);
        self.events.push(Event::CallStarted { index, id, name: name.into() });
        self.calls += 1;
        self.open = Some(index);
    }

    fn arguments(&mut self, more: &str) {
        let Some(open) = self.open.filter(|_| !more.is_empty()) else { return };
        match self.events.last_mut() {
            Some(Event::Arguments { index, text }) if *index == open => *text += more,
            _ => self.events.push(Event::Arguments { index: open, text: more.into() }),
        }
    }

    fn end(&mut self) {
        if let Some(index) = self.open.take() {
            self.events.push(Event::CallEnded { index });
        }
        self.raw.clear();
    }
}

#[cfg(test)]
#[path = "reply_tests.rs"]
mod tests;
