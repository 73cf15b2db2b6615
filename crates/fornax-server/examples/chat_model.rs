//! Writes the tiny model with a chat template that the tests use, for tests in other languages: `chat_model OUT.gguf`.

#[path = "../tests/it/fixture.rs"]
mod fixture;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args_os().nth(1).ok_or("usage: chat_model OUT.gguf")?;
    // Positions enough for a test's conversations.
    const CONTEXT: u32 = 2048;
    fixture::model(CONTEXT).template()?;
    std::fs::write(path, fixture::bytes(CONTEXT))?;
    Ok(())
}
