//! The text of a row, as its tokens come: [`TextStream`].

/// Tokens of the prompt that are decoded before the first new token, because the text of a token may depend on the one before.
const BEFORE: usize = 6;

/// What a token gives: text that is certain, and the number of the stop string that ends the row.
type Released = (String, Option<usize>);

/// The text of a row's new tokens. It gives text when it is certain, and holds it back as long as it may be the beginning of a stop string or
/// of a character.
pub(super) struct TextStream<'a> {
    decode: &'a dyn Fn(&[u32]) -> String,
    stop: &'a [String],
    /// Tokens up to `decoded` have their text in `text` and `held`. Those from `from` on are decoded again with the ones that follow.
    from: usize,
    decoded: usize,
    /// Text that was given.
    text: String,
    /// Text that may be the beginning of a stop string.
    held: String,
}

impl<'a> TextStream<'a> {
    /// The text of the tokens that follow a prompt.
    pub(super) fn new(
        decode: &'a dyn Fn(&[u32]) -> String,
        prompt: usize,
        stop: &'a [String],
    ) -> TextStream<'a> {
        let from = prompt.saturating_sub(BEFORE);
        TextStream { decode, stop, from, decoded: prompt, text: String::new(), held: String::new() }
    }

    /// The text that a further token makes certain. `all` is the prompt and all new tokens.
    pub(super) fn more(&mut self, all: &[u32]) -> Released {
        self.take(all, false)
    }

    /// The text that was held back, when no further token comes.
    pub(super) fn rest(&mut self, all: &[u32]) -> Released {
        self.take(all, true)
    }

    /// All text that was given.
    pub(super) fn into_text(self) -> String {
        self.text
    }

    fn take(&mut self, all: &[u32], is_last: bool) -> Released {
        let [before, with] = [self.decoded, all.len()].map(|end| (self.decode)(&all[self.from..end]));
        // The bytes of a character may be spread over tokens; its first ones alone are decoded to the replacement character.
        if is_last || !with.ends_with(char::REPLACEMENT_CHARACTER) {
            let same = before.chars().zip(with.chars()).take_while(|(a, b)| a == b);
            let same: usize = same.map(|(a, _)| a.len_utf8()).sum();
            self.held += &with[same..];
            (self.from, self.decoded) = (self.decoded, all.len());
        }
        let released = match first_stop(&self.held, self.stop) {
            Some((at, stop)) => {
                self.held.truncate(at);
                (std::mem::take(&mut self.held), Some(stop))
            }
            None if is_last => (std::mem::take(&mut self.held), None),
            None => {
                let kept = self.held.split_off(self.held.len() - possible_stop(&self.held, self.stop));
                (std::mem::replace(&mut self.held, kept), None)
            }
        };
        self.text += &released.0;
        released
    }
}

/// Where the stop string begins that is complete first, and its number: the one that would be found if the text came byte by byte.
fn first_stop(text: &str, stop: &[String]) -> Option<(usize, usize)> {
    let found = stop.iter().enumerate().filter_map(|(i, stop)| Some((text.find(stop.as_str())?, stop, i)));
    found.min_by_key(|&(at, stop, i)| (at + stop.len(), at, i)).map(|(at, _, i)| (at, i))
}

/// The bytes at the end of the text that may be the beginning of a stop string.
fn possible_stop(text: &str, stop: &[String]) -> usize {
    let begins = |stop: &String| {
        let most = text.len().min(stop.len().saturating_sub(1));
        (1..=most).rev().find(|&n| text.as_bytes().ends_with(&stop.as_bytes()[..n])).unwrap_or(0)
    };
    stop.iter().map(begins).max().unwrap_or(0)
}
