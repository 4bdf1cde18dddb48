//! Forms that stand in many places: each setter and each array of a call takes one line.

/// Methods of a builder that assign to fields of `self`.
macro_rules! setters {
    ($(
        $(#[$text:meta])*
        $name:ident($($given:ident: $type:ty),*) => $($($field:ident).+ = $value:expr),+;
    )*) => {
        $($(#[$text])*
        pub fn $name(mut self, $($given: $type),*) -> Self {
            $(self.$($field).+ = $value;)+
            self
        })*
    };
}

/// Extents that have the names of their fields in `$of`.
macro_rules! extents {
    ($of:expr => $($field:ident),*) => { [$((stringify!($field), $of.$field)),*] };
}

/// Checks contiguous arrays, those of them that are given.
macro_rules! check_given {
    ($($name:tt: $array:expr => $shape:expr;)*) => {
        $(if let Some(array) = &$array {
            $crate::spans::check_exact($name, array.len(), &$shape)?;
        })*
    };
}

/// Setters of public fields, which say what they mean.
macro_rules! with_fields {
    ($($field:ident: $type:ty),*) => {
        $(#[doc = concat!(
            "Sets [`", stringify!($field), "`](#structfield.", stringify!($field), ")."
        )]
        pub fn $field(mut self, $field: $type) -> Self {
            self.$field = $field;
            self
        })*
    };
}
