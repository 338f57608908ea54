//! Fields of a request that this version does not know.
//!
//! A decoder drops them, although each may ask for something. A newer client that does not use one
//! may still say so: a number that is 0, which is also false, asks for nothing. Any other unknown
//! field is refused by its number.

use prost::Message;
use prost::encoding::{WireType, decode_key, decode_varint, skip_field};

use crate::rpc::messages::Request;

/// The field of a request that has the options.
const OPTIONS: u32 = 2;

/// A field on the wire.
struct Field<'a> {
    number: u32,
    wire: WireType,
    /// Its value; without the length of a string or a message.
    value: &'a [u8],
}

impl Field<'_> {
    /// True if the value asks for nothing.
    fn is_idle(&self) -> bool {
        let mut value = self.value;
        self.wire == WireType::Varint && decode_varint(&mut value) == Ok(0)
    }
}

/// Decodes a request.
///
/// # Errors
/// The bytes are no request, or have an unknown field that asks for something.
pub fn decode(bytes: &[u8]) -> Result<Request, String> {
    let request =
        Request::decode(bytes).map_err(|error| format!("the request is malformed: {error}"))?;
    refuse_unknown("criu_req", bytes, &request.encode_to_vec())?;
    if let Some(options) = &request.options {
        let given = fields(bytes);
        let given = given.iter().filter(|field| field.number == OPTIONS);
        let known = options.encode_to_vec();
        for options in given {
            refuse_unknown("criu_opts", options.value, &known)?;
        }
    }
    Ok(request)
}

fn refuse_unknown(message: &str, bytes: &[u8], known: &[u8]) -> Result<(), String> {
    let known = fields(known);
    let is_unknown = |field: &&Field<'_>| {
        let is_known = known.iter().any(|known| known.number == field.number);
        !is_known && !field.is_idle()
    };
    match fields(bytes).iter().find(is_unknown) {
        None => Ok(()),
        Some(field) => Err(format!("{message}: field {} is not known", field.number)),
    }
}

/// The fields of a message that was decoded before, so they are well-formed.
fn fields(mut bytes: &[u8]) -> Vec<Field<'_>> {
    let mut fields = Vec::new();
    while let Ok((number, wire)) = decode_key(&mut bytes) {
        let begin = bytes;
        if skip_field(wire, number, &mut bytes, Default::default()).is_err() {
            break;
        }
        let mut value = &begin[..begin.len() - bytes.len()];
        if wire == WireType::LengthDelimited && decode_varint(&mut value).is_err() {
            break;
        }
        fields.push(Field {
            number,
            wire,
            value,
        });
    }
    fields
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::messages::{RequestKind, RequestOptions};

    fn request(in_options: &[u8], in_request: &[u8]) -> Vec<u8> {
        let options = RequestOptions {
            pid: Some(7),
            ..Default::default()
        };
        let mut options = options.encode_to_vec();
        options.extend_from_slice(in_options);
        let kind = [1 << 3, RequestKind::Dump as u8];
        let length = [2 << 3 | 2, u8::try_from(options.len()).unwrap()];
        [&kind, &length, &*options, in_request].concat()
    }

    #[test]
    fn known_fields_are_decoded() {
        let decoded = decode(&request(&[], &[])).unwrap();
        assert_eq!(decoded.kind, RequestKind::Dump as i32);
        assert_eq!(decoded.options.unwrap().pid, Some(7));
    }

    #[test]
    fn unknown_fields_that_ask_for_nothing_are_dropped() {
        // Field 100 is the number 0.
        let field = [0xa0, 6, 0];
        assert!(decode(&request(&field, &field)).is_ok());
    }

    #[test]
    fn other_unknown_fields_are_refused_by_number() {
        let number = [0xa0, 6, 1];
        let text = [0xa2, 6, 1, b'x'];
        for field in [&number[..], &text] {
            let error = decode(&request(field, &[])).unwrap_err();
            assert_eq!(error, "criu_opts: field 100 is not known");
            let error = decode(&request(&[], field)).unwrap_err();
            assert_eq!(error, "criu_req: field 100 is not known");
        }
    }

    #[test]
    fn other_bytes_are_refused() {
        for bytes in [&b"\xff\xff\xff"[..], b"GET / HTTP/1.1\r\n", &[0x12, 0x7f]] {
            assert!(decode(bytes).is_err(), "{bytes:?}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_decoded_or_refused(bytes in proptest::collection::vec(0..=255u8, 0..99)) {
            let _ = decode(&bytes);
        }
    }
}
