//! How families of models write reasoning and calls.

use super::State;

/// How calls are written. JSON and XML are both read between tags, whichever of them comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallFormat {
    /// `<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>`: Hermes, Qwen3, Granite 4, Falcon-H1.
    Hermes,
    /// `<tool_calls>[{"name": "f", "arguments": {"x": 1}}]</tool_calls>`: Jamba.
    Jamba,
    /// `<tool_call><function=f><parameter=x>1</parameter></function></tool_call>`: Qwen3-Next, Qwen3.5, Nemotron-3.
    Xml,
    /// `<|tool_call_start|>[f(x=1)]<|tool_call_end|>`: LFM2.
    Python,
    /// `<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>`
    /// `<|tool_calls_section_end|>`: Kimi.
    Kimi,
}

/// How reasoning is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reasoning {
    /// `<think>…</think>`, at the beginning of an answer or after a block of calls.
    Think,
    /// `Here is my thought process: … Here is my response: …`: Granite 3.
    Spoken,
}

/// How a family of models writes what is not content.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Format {
    /// Calls, if there are any.
    pub calls: Option<CallFormat>,
    /// Reasoning, if there is any.
    pub reasoning: Option<Reasoning>,
}

impl CallFormat {
    /// All, in the order of the documentation.
    pub const ALL: [Self; 5] = [Self::Hermes, Self::Jamba, Self::Xml, Self::Python, Self::Kimi];

    /// The name in options: `hermes`, `jamba`, `qwen3_xml`, `lfm2` or `kimi_k2`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hermes => "hermes",
            Self::Jamba => "jamba",
            Self::Xml => "qwen3_xml",
            Self::Python => "lfm2",
            Self::Kimi => "kimi_k2",
        }
    }

    /// The format of that name; vLLM's names of parsers for the same texts are known too.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "granite4" | "qwen3_json" => Some(Self::Hermes),
            "qwen3_coder" | "nemotron_v3" => Some(Self::Xml),
            _ => Self::ALL.into_iter().find(|format| format.name() == name),
        }
    }

    /// The text before the first call and the text after the last one.
    pub fn tags(self) -> (&'static str, &'static str) {
        match self {
            Self::Hermes | Self::Xml => ("<tool_call>", "</tool_call>"),
            Self::Jamba => ("<tool_calls>", "</tool_calls>"),
            Self::Python => ("<|tool_call_start|>", "<|tool_call_end|>"),
            Self::Kimi => ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        }
    }

    /// Texts that only calls have in a chat template, besides the tags.
    fn signs(self) -> &'static [&'static str] {
        match self {
            Self::Hermes => &["<tool_call>"],
            Self::Jamba => &["<tool_calls>"],
            Self::Xml => &["<function="],
            Self::Python => &["<|tool_call_start|>", "<|tool_list_start|>"],
            Self::Kimi => &["<|tool_calls_section_begin|>", "<|tool_call_begin|>"],
        }
    }
}

impl Reasoning {
    /// The texts before it and after it.
    pub fn tags(self) -> (&'static str, &'static str) {
        match self {
            Self::Think => ("<think>", "</think>"),
            Self::Spoken => ("Here is my thought process:", "Here is my response:"),
        }
    }

    /// The name in options: `think` or `granite`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Think => "think",
            Self::Spoken => "granite",
        }
    }

    /// The form of that name; vLLM's names of parsers for the same texts are known too.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "think" | "qwen3" | "deepseek_r1" | "nemotron_v3" | "kimi_k2" => Some(Self::Think),
            "granite" => Some(Self::Spoken),
            _ => None,
        }
    }
}

impl Format {
    /// The format of the model with this chat template. `is_token` says whether a text is one token of its tokenizer: LFM2's
    /// templates do not name the tags of calls.
    pub fn detect(template: &str, is_token: impl Fn(&str) -> bool) -> Self {
        use CallFormat::{Hermes, Jamba, Kimi, Python, Xml};
        // Templates with XML name `<tool_call>` too.
        let has = |format: &CallFormat| format.signs().iter().any(|sign| template.contains(sign));
        let calls = [Kimi, Python, Xml, Jamba, Hermes].into_iter().find(has);
        let calls = calls.or_else(|| is_token(Python.tags().0).then_some(Python));
        let reasoning = if template.contains(Reasoning::Think.tags().1) {
            Some(Reasoning::Think)
        } else if template.contains(Reasoning::Spoken.tags().0) {
            Some(Reasoning::Spoken)
        } else {
            None
        };
        Self { calls, reasoning }
    }

    /// Whether an answer to this prompt begins within reasoning: the chat template has opened it. The end of the prompt
    /// suffices.
    pub fn opens_reasoning(&self, prompt: &str) -> bool {
        self.reasoning == Some(Reasoning::Think) && prompt.trim_end().ends_with("<think>")
    }
}

/// A text with a meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    /// Numbered: some forms have several texts.
    ReasoningOpen(u8),
    ReasoningClose(u8),
    /// Before calls, and after them.
    CallsOpen,
    CallsClose,
    /// `<function=`
    Function,
    FunctionEnd,
    /// `<parameter=`
    Parameter,
    ParameterEnd,
    KimiCall,
    KimiArguments,
    KimiEnd,
}

/// The marks of a format.
pub(super) struct Marks {
    calls: Option<CallFormat>,
    list: Vec<(Mark, &'static str)>,
}

/// What a text begins with.
pub(super) enum Found {
    Mark(Mark),
    /// It is the beginning of a mark.
    Beginning,
    Nothing,
}

impl Marks {
    pub fn new(calls: Option<CallFormat>, reasoning: Option<Reasoning>) -> Self {
        let mut list = Vec::new();
        if let Some(reasoning) = reasoning {
            let (open, close) = reasoning.tags();
            list.extend([(Mark::ReasoningOpen(0), open), (Mark::ReasoningClose(0), close)]);
        }
        if reasoning == Some(Reasoning::Spoken) {
            list.extend([
                (Mark::ReasoningOpen(1), "Here's my thought process:"),
                (Mark::ReasoningClose(1), "Here's my response:"),
            ]);
        }
        if let Some(calls) = calls {
            let (open, close) = calls.tags();
            list.extend([(Mark::CallsOpen, open), (Mark::CallsClose, close)]);
        }
        match calls {
            Some(CallFormat::Hermes | CallFormat::Xml) => list.extend([
                (Mark::Function, "<function="),
                (Mark::FunctionEnd, "</function>"),
                (Mark::Parameter, "<parameter="),
                (Mark::ParameterEnd, "</parameter>"),
            ]),
            Some(CallFormat::Kimi) => list.extend([
                (Mark::KimiCall, "<|tool_call_begin|>"),
                (Mark::KimiArguments, "<|tool_call_argument_begin|>"),
                (Mark::KimiEnd, "<|tool_call_end|>"),
            ]),
            Some(CallFormat::Jamba | CallFormat::Python) | None => {}
        }
        Self { calls, list }
    }

    pub fn is_python(&self) -> bool {
        self.calls == Some(CallFormat::Python)
    }

    pub fn is_kimi(&self) -> bool {
        self.calls == Some(CallFormat::Kimi)
    }

    pub fn text(&self, mark: Mark) -> &'static str {
        self.list.iter().find(|(m, _)| *m == mark).map_or("", |(_, text)| text)
    }

    /// The mark with this text.
    pub fn find(&self, token: &str) -> Option<Mark> {
        self.list.iter().find(|(_, text)| *text == token).map(|(mark, _)| *mark)
    }

    /// Whether a mark begins with this character.
    pub fn begins(&self, c: char) -> bool {
        self.list.iter().any(|(_, text)| text.starts_with(c))
    }

    /// Whether the state looks for this mark.
    pub fn is_expected(&self, mark: Mark, state: &State) -> bool {
        use Mark::*;
        match state {
            State::Content | State::Reasoning => match mark {
                ReasoningOpen(_) | ReasoningClose(_) | CallsOpen | KimiCall => true,
                // A call without the tag around it.
                Function => self.calls == Some(CallFormat::Xml),
                _ => false,
            },
            State::Before => matches!(mark, Function | KimiCall),
            State::After => matches!(mark, CallsOpen | CallsClose | Function | KimiCall | KimiEnd),
            State::Xml(_) => matches!(mark, FunctionEnd | Parameter | ParameterEnd),
            State::Kimi(call) => call.expects(mark),
            State::Json(_) | State::Python(_) => false,
        }
    }

    /// What `text` begins with.
    pub fn first(&self, text: &str, state: &State) -> Found {
        let mut found = Found::Nothing;
        for (mark, of) in &self.list {
            if !self.is_expected(*mark, state) {
                continue;
            }
            if text.starts_with(of) {
                return Found::Mark(*mark);
            }
            if of.starts_with(text) {
                found = Found::Beginning;
            }
        }
        found
    }
}
