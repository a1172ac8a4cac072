//! Anthropic's blocks: what a conversation has besides text, and tools.

use selkie_core::chat::{Conversation, Message, ToolCall};
use serde_json::{Map, Value, json};

use super::{
    fields::Fields,
    refusal::Refusal,
    speech::{Choice, ToolUse, check_tools},
    wanted::{content, role_of},
};

/// The conversation of a request (system prompt, messages, tools), and how its tools are to be used.
///
/// # Errors
/// If there are no messages, or one has something that cannot be rendered.
pub fn conversation(fields: &Fields<'_>) -> Result<(Conversation, ToolUse), Refusal> {
    let mut messages = Vec::new();
    let system = content(fields, "system")?;
    if !system.is_empty() {
        messages.push(Message::new("system", system));
    }
    let list = fields.list("messages")?.filter(|list| !list.is_empty());
    let list = list.ok_or_else(|| fields.refuse("messages", "is missing or empty"))?;
    for (i, value) in list.into_iter().enumerate() {
        let turn = Fields::of(format!("messages[{i}]"), value)?;
        let role = role_of(&turn)?;
        match turn.list("content") {
            Ok(Some(blocks)) => read_blocks(&turn, &role, &blocks, &mut messages)?,
            Ok(None) => return Err(turn.refuse("content", "is missing")),
            Err(_) => messages.push(Message::new(&role, content(&turn, "content")?)),
        }
    }
    let mut values = Map::new();
    if let Some(thinking) = fields.raw("thinking") {
        let on = Fields::of("thinking".into(), thinking)?.need::<String>("type")? != "disabled";
        values.insert("enable_thinking".into(), on.into());
    }
    let tools = tools(fields)?;
    Ok((Conversation { messages, tools: tools.tools.clone(), values, ..Conversation::default() }, tools))
}

/// Blocks become one message, after a message for each result of a tool.
fn read_blocks(
    turn: &Fields<'_>,
    role: &str,
    blocks: &[&serde_json::value::RawValue],
    all: &mut Vec<Message>,
) -> Result<(), Refusal> {
    let mut message = Message::new(role, "");
    let mut results = 0;
    for (i, block) in blocks.iter().enumerate() {
        let block = Fields::of(format!("{}[{i}]", turn.name("content")), block)?;
        match &*block.need::<String>("type")? {
            "text" => message.content += &block.need::<String>("text")?,
            "thinking" => {
                *message.reasoning_content.get_or_insert_default() += &block.need::<String>("thinking")?;
            }
            // It is readable by its author only.
            "redacted_thinking" => {}
            "tool_use" => {
                let input: Value = block.need("input")?;
                let (id, name) = (block.need::<String>("id")?, block.need::<String>("name")?);
                message.tool_calls.push(ToolCall { id, name, arguments: input });
            }
            "tool_result" => {
                let mut result = Message::new("tool", content(&block, "content")?);
                result.tool_call_id = Some(block.need("tool_use_id")?);
                all.push(result);
                results += 1;
            }
            "image" => return Err(block.refuse("type", "is an image, and this server runs language models only")),
            _ => return Err(block.refuse("type", "is not supported by this server")),
        }
    }
    let empty = message.content.is_empty() && message.tool_calls.is_empty() && message.reasoning_content.is_none();
    if !empty || results == 0 {
        all.push(message);
    }
    Ok(())
}

/// The tools of a request, in OpenAI's form, and how they are to be used.
///
/// # Errors
/// If one is wrong, or runs on Anthropic's servers.
fn tools(fields: &Fields<'_>) -> Result<ToolUse, Refusal> {
    let mut tools = Vec::new();
    for (i, tool) in fields.list("tools")?.unwrap_or_default().into_iter().enumerate() {
        let tool = Fields::of(format!("tools[{i}]"), tool)?;
        if tool.get::<String>("type")?.is_some_and(|kind| kind != "custom") {
            return Err(tool.refuse("type", "is a tool of Anthropic's servers; define it with a schema"));
        }
        check_tools(&tool, "input_schema")?;
        let mut function = json!({ "name": tool.need::<String>("name")? });
        if let Some(text) = tool.get::<String>("description")? {
            function["description"] = text.into();
        }
        function["parameters"] = tool.get("input_schema")?.unwrap_or_else(|| json!({ "type": "object" }));
        tools.push(json!({ "type": "function", "function": function }));
    }
    let Some(choice) = fields.raw("tool_choice") else { return Ok(ToolUse { tools, ..ToolUse::default() }) };
    let choice = Fields::of("tool_choice".into(), choice)?;
    let single = choice.flag("disable_parallel_tool_use")?;
    let choice = match &*choice.need::<String>("type")? {
        "auto" => Choice::Auto,
        "none" => Choice::None,
        "any" => Choice::Required,
        "tool" => Choice::Named(choice.need("name")?),
        _ => return Err(choice.refuse("type", "can only be \"auto\", \"any\", \"tool\" or \"none\"")),
    };
    ToolUse { tools, choice, single }.checked(fields)
}
