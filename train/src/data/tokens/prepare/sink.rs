//! Where encoded documents go: to the training or to the validation file.

use phalanx_tensor::{RngKey, Stream4};

use super::super::TokenWriter;
use super::Prepared;
use crate::Result;

/// A document, or a part of one.
pub(super) struct Part {
    pub(super) tokens: Vec<u32>,
    pub(super) has_text: bool,
    /// Whether the document ends here.
    pub(super) ends_document: bool,
}

/// The files that are being written.
pub(super) struct Sink<'a, 't, 'v> {
    end_of_text: Option<u32>,
    training: &'a mut TokenWriter<'t>,
    validation: Option<(&'a mut TokenWriter<'v>, Draw)>,
    /// The number of the current document.
    document: u64,
    /// Whether the current document has text so far.
    has_text: bool,
    /// Tokens of the current document so far.
    length: u64,
    /// Tokens of each document of the training file, and of the validation file.
    lengths: [Vec<u64>; 2],
    prepared: Prepared,
}

impl<'a, 't, 'v> Sink<'a, 't, 'v> {
    /// With a validation file, that share of the documents goes there.
    pub(super) fn new(
        end_of_text: Option<u32>,
        training: &'a mut TokenWriter<'t>,
        validation: Option<(&'a mut TokenWriter<'v>, f64)>,
    ) -> Sink<'a, 't, 'v> {
        let validation = validation.map(|(writer, share)| (writer, Draw::new(share)));
        Sink {
            end_of_text,
            training,
            validation,
            document: 0,
            has_text: false,
            length: 0,
            lengths: Default::default(),
            prepared: Prepared::default(),
        }
    }

    /// Writes the next part of the text.
    pub(super) fn put(&mut self, part: &Part) -> Result<()> {
        self.has_text |= part.has_text;
        let validates = self.validation.as_ref().is_some_and(|(_, draw)| draw.has(self.document));
        self.push(validates, &part.tokens)?;
        if part.ends_document && self.has_text {
            let end_of_text = self.end_of_text;
            self.push(validates, end_of_text.as_slice())?;
            self.lengths[usize::from(validates)].push(std::mem::take(&mut self.length));
            match validates {
                true => self.prepared.validation_documents += 1,
                false => self.prepared.documents += 1,
            }
            (self.document, self.has_text) = (self.document + 1, false);
        }
        Ok(())
    }

    fn push(&mut self, validates: bool, tokens: &[u32]) -> Result<()> {
        self.length += tokens.len() as u64;
        match &mut self.validation {
            Some((writer, _)) if validates => writer.push(tokens),
            _ => self.training.push(tokens),
        }
    }

    /// What has been written, and how long the documents of each file are.
    pub(super) fn prepared(self) -> (Prepared, [Vec<u64>; 2]) {
        let validation_tokens = self.validation.as_ref().map_or(0, |(writer, _)| writer.len());
        (Prepared { tokens: self.training.len(), validation_tokens, ..self.prepared }, self.lengths)
    }
}

/// Whether so many documents have some that are drawn, and others.
pub(super) fn is_shared(documents: u64, share: f64) -> bool {
    let draw = Draw::new(share);
    let drawn = (0..documents).filter(|&document| draw.has(document)).count() as u64;
    drawn > 0 && drawn < documents
}

/// Which documents are drawn: one at random of each run of 1 / share documents.
struct Draw {
    /// The share, as a part of 2^32.
    share: u64,
    stream: Stream4,
}

/// The draws of validation documents.
const SITE: u64 = 0x7661_6c69;
/// Fixed-point bits of a share.
const BITS: u32 = 32;

impl Draw {
    fn new(share: f64) -> Draw {
        let share = (share * (1u64 << BITS) as f64).round().clamp(1.0, (1u64 << BITS) as f64) as u64;
        Draw { share, stream: RngKey { seed: 0, step: 0 }.site(SITE) }
    }

    fn has(&self, document: u64) -> bool {
        let share = u128::from(self.share);
        let run = (u128::from(document) * share) >> BITS;
        let start = |run: u128| ((run << BITS).div_ceil(share)) as u64;
        let (first, end) = (start(run), start(run + 1));
        let [word, ..] = self.stream.block(run as u64, 0);
        document - first == u64::from(word) % (end - first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_of_the_documents_is_drawn_within_one_of_any_number() {
        for share in [0.001, 0.1, 0.25, 0.3333, 0.5, 0.77, 0.999] {
            let draw = Draw::new(share);
            let mut drawn = 0;
            for document in 0..20_000u64 {
                drawn += u64::from(draw.has(document));
                let wanted = share * (document + 1) as f64;
                assert!((drawn as f64 - wanted).abs() <= 1.001, "{share}: {drawn} of {document}");
            }
        }
        let gaps: Vec<u64> = (0..1000).filter(|&d| Draw::new(0.1).has(d)).collect();
        assert!(gaps.windows(2).any(|pair| pair[1] - pair[0] != 10), "drawn at random");
    }
}
