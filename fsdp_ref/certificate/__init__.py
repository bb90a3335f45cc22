"""Certificates of completion: issued from graded results, signed with Ed25519, checked by anyone who has the course's public key.

    fsdp-ref certificate keygen --out keys                       once a course: course.key (secret) and course.pub (publish it)
    fsdp-ref certificate issue scores.csv --key keys/course.key --course "FSDP from scratch" --out certificates
    fsdp-ref certificate verify certificates/ID.json --public-key keys/course.pub

keys.py (the two keys), results.py (what the graders wrote), record.py (what is signed, and checking it), picture.py (the page to print),
command.py. A certificate says what its issuer signed and nothing more: that the learner's own work was graded is for the course to see to.
This part must never overwrite a key, print one, or take a name from a file as a path.
"""
