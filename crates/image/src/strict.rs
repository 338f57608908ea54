//! Messages of which nothing is overlooked.

use prost::Message;

/// Decodes a message; what it has that `M` does not know is refused.
///
/// Bytes are right only if they are what the message would be encoded as again. So there is no
/// field that nobody looks at, and no second form of one.
///
/// # Errors
/// What is wrong.
pub fn decode<M: Message + Default>(bytes: &[u8]) -> Result<M, String> {
    let message = M::decode(bytes).map_err(|error| error.to_string())?;
    let again = message.encode_to_vec();
    if again == bytes {
        return Ok(message);
    }
    let known = fields(&again);
    match fields(bytes)
        .into_iter()
        .find(|field| !known.contains(field))
    {
        Some(field) => Err(format!("field {field} is not known to this version")),
        None => Err("a field inside of it is not known to this version".into()),
    }
}

/// The numbers of the fields that a message has.
fn fields(mut bytes: &[u8]) -> Vec<u32> {
    let mut fields = Vec::new();
    while let Ok((field, wire)) = prost::encoding::decode_key(&mut bytes) {
        fields.push(field);
        let skipped = prost::encoding::skip_field(wire, field, &mut bytes, Default::default());
        if skipped.is_err() {
            break;
        }
    }
    fields
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, PartialEq, Message)]
    struct OldMessage {
        #[prost(uint32, tag = "1")]
        number: u32,
        #[prost(message, optional, tag = "2")]
        inside: Option<OldPart>,
    }

    #[derive(Clone, PartialEq, Message)]
    struct OldPart {
        #[prost(string, tag = "1")]
        name: String,
    }

    #[derive(Clone, PartialEq, Message)]
    struct NewMessage {
        #[prost(uint32, tag = "1")]
        number: u32,
        #[prost(message, optional, tag = "2")]
        inside: Option<NewPart>,
        #[prost(uint64, tag = "17")]
        more: u64,
    }

    #[derive(Clone, PartialEq, Message)]
    struct NewPart {
        #[prost(string, tag = "1")]
        name: String,
        #[prost(bool, tag = "2")]
        flag: bool,
    }

    fn decoded(flag: bool, more: u64) -> Result<OldMessage, String> {
        let name = "a".to_owned();
        let inside = Some(NewPart { name, flag });
        let new = NewMessage {
            number: 3,
            inside,
            more,
        };
        decode(&new.encode_to_vec())
    }

    #[test]
    fn what_is_not_known_is_refused() {
        let inside = Some(OldPart { name: "a".into() });
        assert_eq!(decoded(false, 0), Ok(OldMessage { number: 3, inside }));
        assert_eq!(
            decoded(false, 1),
            Err("field 17 is not known to this version".into())
        );
        assert!(
            decoded(true, 0)
                .expect_err("refused")
                .contains("inside of it")
        );
        assert!(decode::<OldMessage>(&[8]).is_err());
        // Zero is not stored: this is another form of nothing.
        assert!(decode::<OldMessage>(&[8, 0]).is_err());
    }
}
