//! What processes tell each other of a communicator's ranks, as bytes.

use std::io::{self, Read, Write};

use crate::call::{Call, Operation};
use crate::reduction::{ElementType, Reduction};

/// The most bytes of a message: a larger length is no message.
const BYTES_MAX: u64 = 1 << 34;

/// News of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Message {
    /// The rank has come, and says how many ranks there are and which GPU is its own.
    Hello { rank: usize, ranks: usize, device: i32 },
    /// The rank's stream has come to the operation `ticket`, which has these calls, each with the elements that it
    /// reads.
    Post { rank: usize, ticket: u64, calls: Vec<(Call, Vec<u8>)> },
    /// The rank takes part no more.
    Leave { rank: usize },
}

impl Message {
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let numbers = |numbers: &[u64]| numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>();
        match self {
            Message::Hello { rank, ranks, device } => {
                numbers(&[0, *rank as u64, *ranks as u64, *device as u64])
            }
            Message::Leave { rank } => numbers(&[2, *rank as u64]),
            Message::Post { rank, ticket, calls } => {
                let mut all = numbers(&[1, *rank as u64, *ticket, calls.len() as u64]);
                for (call, data) in calls {
                    let [what, detail, peer] = operation(call.operation);
                    let (kind, count) = (call.kind as u64, call.count as u64);
                    all.extend(numbers(&[what, detail, peer, kind, count, data.len() as u64]));
                    all.extend(data);
                }
                all
            }
        }
    }

    /// The message in these bytes, if it is one. Its calls have no addresses here.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Message> {
        let mut rest = bytes;
        let message = match number(&mut rest)? {
            0 => {
                let (rank, ranks) = (size(&mut rest)?, size(&mut rest)?);
                Message::Hello { rank, ranks, device: number(&mut rest)?.try_into().ok()? }
            }
            1 => {
                let (rank, ticket) = (size(&mut rest)?, number(&mut rest)?);
                let count = number(&mut rest)?;
                Message::Post {
                    rank,
                    ticket,
                    calls: (0..count).map(|_| called(&mut rest)).collect::<Option<_>>()?,
                }
            }
            2 => Message::Leave { rank: size(&mut rest)? },
            _ => return None,
        };
        rest.is_empty().then_some(message)
    }
}

fn number(rest: &mut &[u8]) -> Option<u64> {
    let (number, after) = rest.split_first_chunk()?;
    *rest = after;
    Some(u64::from_le_bytes(*number))
}

fn size(rest: &mut &[u8]) -> Option<usize> {
    number(rest)?.try_into().ok()
}

fn called(rest: &mut &[u8]) -> Option<(Call, Vec<u8>)> {
    let (what, detail, peer) = (number(rest)?, number(rest)?, size(rest)?);
    let reduction = || Reduction::from_number(detail.try_into().ok()?).ok();
    let operation = match what {
        0 => Operation::AllReduce(reduction()?),
        1 => Operation::Reduce(reduction()?, peer),
        2 => Operation::ReduceScatter(reduction()?),
        3 => Operation::AllGather,
        4 => Operation::Broadcast(peer),
        5 => Operation::AllToAll,
        6 => Operation::Gather(peer),
        7 => Operation::Scatter(peer),
        8 => Operation::Send(peer),
        9 => Operation::Receive(peer),
        _ => return None,
    };
    let kind = ElementType::from_number(number(rest)?.try_into().ok()?).ok()?;
    let (count, length) = (size(rest)?, size(rest)?);
    let (data, after) = rest.split_at_checked(length)?;
    *rest = after;
    Some((Call { operation, kind, count, from: 0, to: 0 }, data.to_vec()))
}

/// The operation's number, its reduction's number, and its root or peer.
fn operation(operation: Operation) -> [u64; 3] {
    match operation {
        Operation::AllReduce(by) => [0, by as u64, 0],
        Operation::Reduce(by, root) => [1, by as u64, root as u64],
        Operation::ReduceScatter(by) => [2, by as u64, 0],
        Operation::AllGather => [3, 0, 0],
        Operation::Broadcast(root) => [4, 0, root as u64],
        Operation::AllToAll => [5, 0, 0],
        Operation::Gather(root) => [6, 0, root as u64],
        Operation::Scatter(root) => [7, 0, root as u64],
        Operation::Send(peer) => [8, 0, peer as u64],
        Operation::Receive(peer) => [9, 0, peer as u64],
    }
}

/// Writes bytes with their length before them.
pub(crate) fn write(to: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    to.write_all(&(bytes.len() as u64).to_le_bytes())?;
    to.write_all(bytes)
}

/// Reads what [`write`] wrote.
pub(crate) fn read(from: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut length = [0; 8];
    from.read_exact(&mut length)?;
    let length = u64::from_le_bytes(length);
    if length > BYTES_MAX {
        return Err(io::Error::other("a message of no sensible length"));
    }
    let mut bytes = Vec::new();
    from.take(length).read_to_end(&mut bytes)?;
    if bytes.len() as u64 == length { Ok(bytes) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_comes_back_and_a_cut_one_is_none() {
        let call = |operation| Call { operation, kind: ElementType::Bf16, count: 3, from: 0, to: 0 };
        let calls = [
            (call(Operation::Reduce(Reduction::Min, 2)), vec![1; 6]),
            (call(Operation::Send(1)), vec![2; 6]),
            (call(Operation::Receive(7)), vec![]),
        ];
        let messages = [
            Message::Hello { rank: 1, ranks: 3, device: 2 },
            Message::Post { rank: 2, ticket: 9, calls: calls.to_vec() },
            Message::Leave { rank: 0 },
        ];
        for message in messages {
            let bytes = message.bytes();
            assert_eq!(Message::from_bytes(&bytes), Some(message));
            for cut in 0..bytes.len() {
                assert_eq!(Message::from_bytes(&bytes[..cut]), None, "cut at {cut}");
            }
            let mut sent = Vec::new();
            write(&mut sent, &bytes).unwrap();
            assert_eq!(read(&mut &sent[..]).unwrap(), bytes);
            assert!(read(&mut &sent[..sent.len() - 1]).is_err());
        }
    }
}
