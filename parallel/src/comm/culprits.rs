//! [`culprits`]: who is to blame when ranks wait for ranks that wait for ranks.

/// Of ranks that are waited for, and those that they wait for in turn, the ones that wait for nobody; if all do, in a
/// circle, those first named. `blockers` gives the ranks that a rank waits for.
pub(crate) fn culprits(missing: Vec<usize>, blockers: impl Fn(usize) -> Vec<usize>) -> Vec<usize> {
    let (mut seen, mut found) = (missing.clone(), vec![]);
    let mut next = 0;
    while let Some(&rank) = seen.get(next) {
        next += 1;
        let before = blockers(rank);
        if before.is_empty() {
            found.push(rank);
        }
        for rank in before {
            if !seen.contains(&rank) {
                seen.push(rank);
            }
        }
    }
    found.sort_unstable();
    if found.is_empty() { missing } else { found }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blame_goes_to_the_end_of_the_chain() {
        let waits = |rank: usize| [vec![1], vec![2], vec![], vec![4], vec![3]][rank].clone();
        assert_eq!(culprits(vec![0], waits), [2]);
        assert_eq!(culprits(vec![2, 3], waits), [2]);
        assert_eq!(culprits(vec![4], waits), [4]);
    }
}
