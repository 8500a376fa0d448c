//! A model's whole tensors, made of what ranks hold of it; Hugging Face folders of them.
