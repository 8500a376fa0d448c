//! [`Chat`]: a conversation with a model, turn by turn.

use std::path::Path;

use super::{ChatTemplate, Codec, Message, end_tokens};
use crate::Result;

/// A conversation with the model of a folder: its messages so far, and what makes tokens of them.
pub struct Chat {
    codec: Codec,
    template: ChatTemplate,
    messages: Vec<Message>,
    end_tokens: Vec<u32>,
    end_text: Option<String>,
}

impl Chat {
    /// A conversation by the tokenizer and the template of a folder. An answer ends at the folder's end tokens (`eos_token_id`, one or a list,
    /// of `generation_config.json` and `config.json`) and at the text with which the template ends one.
    ///
    /// # Errors
    /// As [`Codec::of`] and [`ChatTemplate::of`]; if neither the folder nor the template says where an answer ends.
    pub fn of(folder: &Path) -> Result<Chat> {
        let (codec, template) = (Codec::of(folder)?, ChatTemplate::of(folder)?);
        let end_tokens = end_tokens(folder)?;
        let end_text = match template.end_of_turn() {
            Err(why) if end_tokens.is_empty() => return Err(why),
            end => end.ok(),
        };
        Ok(Chat { codec, template, messages: Vec::new(), end_tokens, end_text })
    }

    /// Adds a message that is not answered at once, such as one of the role `system`.
    #[must_use]
    pub fn with(mut self, message: Message) -> Chat {
        self.messages.push(message);
        self
    }

    /// Adds what the user says. Returns the tokens of the whole conversation, behind which the model's answer comes.
    ///
    /// # Errors
    /// Those of the template; if a token is beyond the model's vocabulary. The message is not added then.
    pub fn ask(&mut self, text: &str, vocabulary: usize) -> Result<Vec<u32>> {
        self.messages.push(Message::new("user", text));
        let rendered = self.template.render(&self.messages, true);
        let tokens = rendered.and_then(|text| self.codec.encode(text.as_bytes(), vocabulary));
        if tokens.is_err() {
            self.messages.pop();
        }
        tokens
    }

    /// Adds the model's answer.
    pub fn answered(&mut self, text: impl Into<String>) {
        self.messages.push(Message::new("assistant", text));
    }

    /// The messages so far.
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// The tokenizer.
    pub fn codec(&self) -> &Codec {
        &self.codec
    }

    /// The tokens at which an answer ends.
    pub fn end_tokens(&self) -> &[u32] {
        &self.end_tokens
    }

    /// The text at which an answer ends, if the template has one.
    pub fn end_text(&self) -> Option<&str> {
        self.end_text.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chat_has_its_history_and_knows_where_answers_end() {
        let folder = std::env::temp_dir().join(format!("phalanx-chat-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).unwrap();
        let refused = || Chat::of(&folder).err().unwrap().to_string();
        write("chat_template.jinja", "{% for m in messages %}{{ m.role[:1] + m.content }}{% endfor %}");
        assert!(refused().contains("writes nothing behind an answer"), "{}", refused());
        write("config.json", r#"{"eos_token_id": 5}"#);
        write("generation_config.json", r#"{"eos_token_id": [7, 9]}"#);
        let chat = Chat::of(&folder).unwrap();
        assert_eq!((chat.end_tokens(), chat.end_text()), (&[7, 9, 5][..], None));
        write(
            "chat_template.jinja",
            "{% for m in messages %}{{ m.role[:1] + m.content }}<e>\n{% endfor %}{% if add_generation_prompt %}a{% endif %}",
        );
        let mut chat = Chat::of(&folder).unwrap().with(Message::new("system", "S"));
        assert_eq!(chat.end_text(), Some("<e>"));
        let text =
            |tokens: Vec<u32>| String::from_utf8(tokens.iter().map(|&token| token as u8).collect()).unwrap();
        assert_eq!(text(chat.ask("hi", 256).unwrap()), "sS<e>\nuhi<e>\na");
        chat.answered("yo");
        assert_eq!(text(chat.ask("b", 256).unwrap()), "sS<e>\nuhi<e>\nayo<e>\nub<e>\na");
        assert!(chat.ask("z", 122).unwrap_err().to_string().contains("vocabulary of 122"));
        assert_eq!(chat.messages().len(), 4);
        write("generation_config.json", r#"{"eos_token_id": "x"}"#);
        assert!(refused().ends_with(r#"`eos_token_id`: got "x", wanted a token's number or a list of such"#));
        std::fs::remove_dir_all(folder).unwrap();
    }
}
