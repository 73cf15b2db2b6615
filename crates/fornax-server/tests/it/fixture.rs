//! A tiny model with a chat template, made from a fixture that has none. Used by the tests and by the example that
//! serves it to other programs' tests.

use std::path::PathBuf;
use std::sync::Arc;

use fornax_engine::Model;
use fornax_gguf::{Gguf, GgufWriter};

/// Messages and tools in the manner of Qwen: ChatML, calls as JSON between marks.
pub(crate) const TEMPLATE: &str = r#"{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- 'Functions:\n<tools>' }}
    {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
    {{- '\n</tools>\nCall them so:\n<tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if message.reasoning_content %}{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- elif message.role != 'system' %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"#;

/// The file of the model.
pub(crate) fn bytes(context: u32) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../testdata/models/qwen3-q8_0/model.gguf");
    let gguf = Gguf::open(&path).expect("the fixture is there");
    let mut metadata = gguf.metadata().clone();
    metadata.set("tokenizer.chat_template", TEMPLATE);
    metadata.set("qwen3.context_length", context);
    let mut writer = GgufWriter::new(&metadata).expect("the metadata are sound");
    for tensor in gguf.tensors() {
        writer.tensor(&tensor.name, tensor.ty, &tensor.dims).expect("a tensor of a sound file");
    }
    let mut writer = writer.begin(Vec::new()).expect("memory takes everything");
    for tensor in gguf.tensors() {
        writer.write(gguf.data(tensor)).expect("memory takes everything");
    }
    writer.finish().expect("every tensor was written")
}

/// The model.
pub(crate) fn model(context: u32) -> Arc<Model> {
    let gguf = Gguf::from_bytes(bytes(context)).expect("what was written can be read");
    Arc::new(Model::from_gguf(gguf).expect("the fixture is a model"))
}
