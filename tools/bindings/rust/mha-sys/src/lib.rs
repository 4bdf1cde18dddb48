#![doc = include_str!("../README.md")]
#![no_std]
#![allow(non_camel_case_types)]

include!("bindings.rs"); // written from mha.h by systest
