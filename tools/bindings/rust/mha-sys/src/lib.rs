#![doc = include_str!("../README.md")]
#![no_std]
#![allow(non_camel_case_types)]
#![allow(rustdoc::broken_intra_doc_links)] // C's brackets

include!("bindings.rs"); // written from mha.h by systest
