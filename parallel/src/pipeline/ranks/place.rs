//! [`place`]: which blocks a stage has. Pure.

use phalanx_nn::cut;
use phalanx_nn::models::Stage;

use crate::{Error, Result};

/// A model's blocks laid over stages: evenly, earlier stages take the remainder, the embedding is with the first and the
/// norm and head with the last. A stage may have no blocks, where there are more stages than blocks; it passes its input on.
///
/// # Errors
/// If there is no stage.
///
/// ```
/// use phalanx_parallel::pipeline::ranks::place;
/// let stages = place(5, 3)?;
/// assert_eq!(stages.iter().map(|stage| stage.layers.clone()).collect::<Vec<_>>(), [0..2, 2..4, 4..5]);
/// assert!(stages[0].first && stages[2].last && !stages[1].first && !stages[1].last);
/// # Ok::<(), phalanx_parallel::Error>(())
/// ```
pub fn place(blocks: usize, stages: usize) -> Result<Vec<Stage>> {
    if stages == 0 {
        return Err(Error::Config(format!("place: got 0 stages for {blocks} blocks, wanted at least 1")));
    }
    let stage = |(i, layers)| Stage { layers, first: i == 0, last: i + 1 == stages };
    Ok(cut(blocks, stages).into_iter().enumerate().map(stage).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn earlier_stages_take_the_remainder_and_the_ends_have_the_ends() {
        for (blocks, stages, sizes) in [
            (4, 1, &[4][..]),
            (4, 2, &[2, 2]),
            (4, 3, &[2, 1, 1]),
            (6, 4, &[2, 2, 1, 1]),
            (6, 8, &[1, 1, 1, 1, 1, 1, 0, 0]),
            (0, 2, &[0, 0]),
        ] {
            let placed = place(blocks, stages).unwrap();
            assert_eq!(placed.iter().map(|s| s.layers.len()).collect::<Vec<_>>(), sizes);
            assert!(placed.windows(2).all(|pair| pair[0].layers.end == pair[1].layers.start));
            assert_eq!((placed[0].layers.start, placed[stages - 1].layers.end), (0, blocks));
            assert!(
                placed.iter().enumerate().all(|(i, s)| s.first == (i == 0) && s.last == (i + 1 == stages))
            );
        }
        let error = place(4, 0).unwrap_err().to_string();
        assert!(error.contains("got 0 stages for 4 blocks"), "{error}");
    }
}
