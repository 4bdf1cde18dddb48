//! What runs a call once its slices have been checked.

use std::mem::{size_of, zeroed};

use mha_sys as sys;

use crate::error::check;
use crate::{CallInfo, Error, ErrorKind, Result, Workspace};

/// A call as the library takes it: arguments whose slices have been checked, and a valid layer.
pub(crate) enum Call<'a> {
    Forward(*const sys::mha_layer, &'a sys::mha_forward_args),
    Attention(&'a sys::mha_attention_args),
    ChooseKeys(&'a sys::mha_choose_keys_args),
    Linear(*const sys::mha_layer, &'a sys::mha_linear_args),
    Recurrent(&'a sys::mha_recurrent_args),
    CausalConv(&'a sys::mha_causal_conv_args),
}

impl Call<'_> {
    pub fn run(&self, workspace: &mut Workspace) -> Result<()> {
        let memory = workspace.at_least(self.workspace_bytes()?)?;
        let (start, len) = (memory.as_mut_ptr().cast(), memory.len());
        // SAFETY: as said above; memory of this length.
        check(|error| unsafe {
            match *self {
                Self::Forward(layer, args) => sys::mha_forward(layer, args, start, len, error),
                Self::Attention(args) => sys::mha_attention(args, start, len, error),
                Self::ChooseKeys(args) => sys::mha_choose_keys(args, start, len, error),
                Self::Linear(layer, args) => sys::mha_linear(layer, args, start, len, error),
                Self::Recurrent(args) => sys::mha_recurrent_attention(args, start, len, error),
                Self::CausalConv(args) => sys::mha_causal_conv(args, start, len, error),
            }
        })
    }

    pub fn workspace_bytes(&self) -> Result<usize> {
        let mut bytes = 0;
        // SAFETY: as said above.
        check(|error| unsafe {
            match *self {
                Self::Forward(layer, args) => {
                    sys::mha_forward_workspace(layer, args, &mut bytes, error)
                }
                Self::Attention(args) => sys::mha_attention_workspace(args, &mut bytes, error),
                Self::ChooseKeys(args) => sys::mha_choose_keys_workspace(args, &mut bytes, error),
                Self::Linear(layer, args) => {
                    sys::mha_linear_workspace(layer, args, &mut bytes, error)
                }
                Self::Recurrent(args) => {
                    sys::mha_recurrent_attention_workspace(args, &mut bytes, error)
                }
                Self::CausalConv(args) => sys::mha_causal_conv_workspace(args, &mut bytes, error),
            }
        })?;
        Ok(bytes)
    }

    pub fn info(&self) -> Result<CallInfo> {
        if let Self::ChooseKeys(_) | Self::CausalConv(_) = self {
            let message = "what choosing keys or a convolution costs is not told; ask for its \
                workspace_bytes";
            return Err(Error::new(ErrorKind::InvalidValue, message));
        }
        // SAFETY: numbers.
        let mut info: sys::mha_call_info = unsafe { zeroed() };
        info.struct_size = size_of::<sys::mha_call_info>();
        // SAFETY: as said above.
        check(|error| unsafe {
            match *self {
                Self::Forward(layer, args) => sys::mha_forward_info(layer, args, &mut info, error),
                Self::Attention(args) => sys::mha_attention_info(args, &mut info, error),
                Self::ChooseKeys(_) | Self::CausalConv(_) => unreachable!("refused above"),
                Self::Linear(layer, args) => sys::mha_linear_info(layer, args, &mut info, error),
                Self::Recurrent(args) => sys::mha_recurrent_attention_info(args, &mut info, error),
            }
        })?;
        Ok(CallInfo::of_raw(&info))
    }
}

/// What each kind of call ends with.
macro_rules! runners {
    () => {
        /// Runs the call. The workspace grows if it is smaller than
        /// [`workspace_bytes`](Self::workspace_bytes).
        ///
        /// # Errors
        ///
        /// [`ErrorKind::SliceLength`](crate::ErrorKind::SliceLength) for a slice that does not have
        /// its shape, [`ErrorKind::InvalidValue`](crate::ErrorKind::InvalidValue) for settings that
        /// contradict each other or do nothing, and others as [`ErrorKind`](crate::ErrorKind) says.
        /// Nothing is written then.
        pub fn run(self, workspace: &mut Workspace) -> Result<()> {
            self.with_args(|call| call.run(workspace))
        }

        /// Returns the bytes of workspace that the call needs. They never shrink as its dimensions,
        /// threads or optional outputs grow, so a workspace for the largest call serves every
        /// smaller one.
        ///
        /// # Errors
        ///
        /// Those of [`run`](Self::run).
        pub fn workspace_bytes(&self) -> Result<usize> {
            self.with_args(|call| call.workspace_bytes())
        }

        /// Returns how the call would run now, and what it would cost.
        ///
        /// # Errors
        ///
        /// Those of [`run`](Self::run).
        pub fn info(&self) -> Result<CallInfo> {
            self.with_args(|call| call.info())
        }
    };
}
pub(crate) use runners;
