//! A pipeline over ranks: each runs its part of a [schedule](super::schedule).
