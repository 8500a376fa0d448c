//! How a token lies in a file: little-endian integers of several widths.

/// The integer that a token is stored as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    I64,
}

impl Encoding {
    /// Bytes of a token.
    pub(super) const fn size(self) -> usize {
        match self {
            Encoding::U8 | Encoding::I8 => 1,
            Encoding::U16 | Encoding::I16 => 2,
            Encoding::U32 | Encoding::I32 => 4,
            Encoding::I64 => 8,
        }
    }

    /// How many tokens, counted from 0, can be stored.
    pub(super) const fn vocabulary_max(self) -> u64 {
        match self {
            Encoding::I8 => 1 << 7,
            Encoding::U8 => 1 << 8,
            Encoding::I16 => 1 << 15,
            Encoding::U16 => 1 << 16,
            Encoding::I32 => 1 << 31,
            Encoding::U32 | Encoding::I64 => 1 << 32,
        }
    }

    /// Reads as many tokens as `to` has from `bytes`. Of a number that is no token, its place and value are returned.
    pub(super) fn decode(self, bytes: &[u8], to: &mut [u32]) -> Result<(), (usize, i64)> {
        let mut wrong = None;
        let mut signed = |place: usize, value: i64| {
            u32::try_from(value).unwrap_or_else(|_| {
                wrong.get_or_insert((place, value));
                0
            })
        };
        macro_rules! each {
            ($type:ty, $convert:expr) => {{
                let (values, _) = bytes.as_chunks::<{ size_of::<$type>() }>();
                to.iter_mut().zip(values).enumerate().for_each(|(place, (to, &value))| {
                    *to = $convert(place, <$type>::from_le_bytes(value));
                })
            }};
        }
        match self {
            Encoding::U8 => each!(u8, |_, value: u8| value.into()),
            Encoding::U16 => each!(u16, |_, value: u16| value.into()),
            Encoding::U32 => each!(u32, |_, value: u32| value),
            Encoding::I8 => each!(i8, |place, value: i8| signed(place, value.into())),
            Encoding::I16 => each!(i16, |place, value: i16| signed(place, value.into())),
            Encoding::I32 => each!(i32, |place, value: i32| signed(place, value.into())),
            Encoding::I64 => each!(i64, |place, value: i64| signed(place, value)),
        }
        wrong.map_or(Ok(()), Err)
    }

    /// Appends tokens, which are below [`Encoding::vocabulary_max`].
    pub(super) fn encode(self, tokens: &[u32], bytes: &mut Vec<u8>) {
        for &token in tokens {
            let wide = u64::from(token).to_le_bytes();
            bytes.extend_from_slice(&wide[..self.size()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Encoding; 7] = [
        Encoding::U8,
        Encoding::I8,
        Encoding::U16,
        Encoding::I16,
        Encoding::U32,
        Encoding::I32,
        Encoding::I64,
    ];

    #[test]
    fn what_is_written_is_read_up_to_the_largest_token() {
        for encoding in ALL {
            let largest = (encoding.vocabulary_max() - 1) as u32;
            let tokens = [0, 1, largest, largest / 2];
            let mut bytes = Vec::new();
            encoding.encode(&tokens, &mut bytes);
            assert_eq!(bytes.len(), 4 * encoding.size());
            let mut read = [9; 4];
            encoding.decode(&bytes, &mut read).unwrap();
            assert_eq!(read, tokens, "{encoding:?}");
        }
    }

    #[test]
    fn the_first_number_that_is_no_token_is_found() {
        let mut to = [0; 3];
        assert_eq!(Encoding::I8.decode(&[1, 0xff, 0xfe], &mut to), Err((1, -1)));
        assert_eq!(Encoding::I16.decode(&[1, 0, 2, 0, 0, 0x80], &mut to), Err((2, -32768)));
        let mut bytes = (-5i32).to_le_bytes().to_vec();
        bytes.extend([0; 8]);
        assert_eq!(Encoding::I32.decode(&bytes, &mut to), Err((0, -5)));
        let wide: Vec<u8> = [3i64, 1 << 32, -1].iter().flat_map(|x| x.to_le_bytes()).collect();
        assert_eq!(Encoding::I64.decode(&wide, &mut to), Err((1, 1 << 32)));
    }
}
