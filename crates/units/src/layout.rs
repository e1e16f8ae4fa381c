//! Fixed little-endian layouts, as the tables of a specification give them.

/// A value with a fixed size and a little-endian encoding.
pub trait Field: Copy {
    /// Size in bytes.
    const BYTES: usize;

    /// Reads the value at `offset`, or zeros if it is not all inside `bytes`.
    fn read(bytes: &[u8], offset: usize) -> Self;

    /// Writes the value at `offset`, if all of it is inside `bytes`.
    fn write(self, bytes: &mut [u8], offset: usize);
}

macro_rules! integers {
    ($($integer:ty),*) => {$(
        impl Field for $integer {
            const BYTES: usize = size_of::<$integer>();

            #[inline]
            fn read(bytes: &[u8], offset: usize) -> Self {
                let place = bytes.get(offset..).and_then(|rest| rest.first_chunk());
                place.map_or(0, |place| Self::from_le_bytes(*place))
            }

            #[inline]
            fn write(self, bytes: &mut [u8], offset: usize) {
                let place = bytes.get_mut(offset..).and_then(|rest| rest.first_chunk_mut());
                if let Some(place) = place {
                    *place = self.to_le_bytes();
                }
            }
        }
    )*};
}
integers!(u8, u16, u32, u64, u128);

impl<T: Field, const COUNT: usize> Field for [T; COUNT] {
    const BYTES: usize = COUNT.saturating_mul(T::BYTES);

    #[inline]
    fn read(bytes: &[u8], offset: usize) -> Self {
        let at = |index: usize| offset.saturating_add(index.saturating_mul(T::BYTES));
        std::array::from_fn(|index| T::read(bytes, at(index)))
    }

    #[inline]
    fn write(self, bytes: &mut [u8], offset: usize) {
        for (index, value) in self.into_iter().enumerate() {
            value.write(bytes, offset.saturating_add(index.saturating_mul(T::BYTES)));
        }
    }
}

/// Declares a structure with the byte offset of each field. Bytes that belong to no field are
/// reserved: they are encoded as zeros and not decoded. Fields that overlap, are out of order or
/// reach past the end do not compile.
///
/// ```
/// sidecore_units::layout! {
///     /// A header.
///     pub struct Header: 8 {
///         /// What is asked.
///         pub kind: u16 = 0,
///         /// Size of what follows, in bytes.
///         pub len_bytes: u32 = 4,
///     }
/// }
/// let header = Header { kind: 7, len_bytes: 0x100 };
/// assert_eq!(header.encode(), [7, 0, 0, 0, 0, 1, 0, 0]);
/// assert_eq!(Header::decode(&header.encode()), header);
/// ```
#[macro_export]
macro_rules! layout {
    (
        $(#[$meta:meta])*
        pub struct $name:ident: $bytes:literal {
            $($(#[$field_meta:meta])* pub $field:ident: $type:ty = $offset:expr,)*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name {
            $($(#[$field_meta])* pub $field: $type,)*
        }

        impl $name {
            /// Size in bytes.
            pub const BYTES: usize = $bytes;

            /// The bytes of the structure.
            #[must_use]
            #[inline]
            pub fn encode(&self) -> [u8; $bytes] {
                let mut bytes = [0; $bytes];
                $($crate::layout::Field::write(self.$field, &mut bytes, $offset);)*
                bytes
            }

            /// The structure in `bytes`.
            #[must_use]
            #[inline]
            pub fn decode(bytes: &[u8; $bytes]) -> Self {
                Self { $($field: $crate::layout::Field::read(bytes, $offset),)* }
            }
        }

        impl Default for $name {
            fn default() -> Self {
                Self::decode(&[0; $bytes])
            }
        }

        impl $crate::layout::Field for $name {
            const BYTES: usize = $name::BYTES;

            #[inline]
            fn read(bytes: &[u8], offset: usize) -> Self {
                Self::decode(&$crate::layout::Field::read(bytes, offset))
            }

            #[inline]
            fn write(self, bytes: &mut [u8], offset: usize) {
                $crate::layout::Field::write(self.encode(), bytes, offset);
            }
        }

        const _: () = {
            let mut end = 0;
            $(
                assert!(
                    $offset >= end,
                    concat!(stringify!($field), " overlaps the field before it")
                );
                end = $offset + <$type as $crate::layout::Field>::BYTES;
            )*
            assert!(end <= $bytes, "a field reaches past the end");
        };
    };
}

#[cfg(test)]
mod tests {
    use super::Field;

    layout! {
        /// Every kind of field, with a gap before and behind the pair.
        pub struct Mixed: 24 {
            pub byte: u8 = 0,
            pub pair: [u16; 2] = 4,
            pub text: [u8; 3] = 9,
            pub wide: u64 = 16,
        }
    }

    layout! {
        /// A layout with another inside it.
        pub struct Outer: 50 {
            pub mixed: [Mixed; 2] = 1,
        }
    }

    const MIXED: Mixed =
        Mixed { byte: 1, pair: [0x0302, 0x0504], text: *b"abc", wide: 0x0d0c_0b0a_0908_0706 };

    #[test]
    fn each_field_is_at_its_offset_and_the_gaps_are_zero() {
        let bytes = MIXED.encode();
        assert_eq!(bytes[..9], [1, 0, 0, 0, 2, 3, 4, 5, 0]);
        assert_eq!(bytes[9..16], [b'a', b'b', b'c', 0, 0, 0, 0]);
        assert_eq!(bytes[16..], [6, 7, 8, 9, 10, 11, 12, 13]);
        assert_eq!(Mixed::decode(&bytes), MIXED);
    }

    #[test]
    fn a_layout_is_a_field_of_another() {
        let outer = Outer { mixed: [MIXED, Mixed::default()] };
        let bytes = outer.encode();
        assert_eq!(bytes[1..25], MIXED.encode());
        assert_eq!(Outer::decode(&bytes), outer);
    }

    #[test]
    fn a_field_outside_of_the_bytes_is_zero_and_writes_nothing() {
        let mut bytes = [0xff; 4];
        for offset in [1, 4, usize::MAX] {
            assert_eq!(u32::read(&bytes, offset), 0);
            0_u32.write(&mut bytes, offset);
        }
        assert_eq!(bytes, [0xff; 4]);
    }
}
