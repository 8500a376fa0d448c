//! One rank goes wrong; all must end, and say why.
