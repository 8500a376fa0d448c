//! One process that drives several devices (torchgpipe, arXiv:2004.09910).
