# ruff: noqa: SIM905 - a list of words is easier to read as text
"""Plain English words, mixed into training texts so that an unknown word is no surprise."""

from __future__ import annotations

from typing import Final

PLAIN: Final = tuple(
    """
about above abroad absolute accept access accessed across active actual actually add added
addition after afternoon again air alias all allow allowed allows alone along already also
always among ancient and animals another answer any apple arbitrary are arg argument arguments
argv around arrive arrives assign assigned attr attribute augmented autumn available avoid away
back bakery barn base bases bay beach beautiful because bed been before beginning behavior being
below beside best better between big binary binding bird bit bitwise black block blocks blue
board boat boats body born both bound bread break bridge bright bring brings broad brother
brought buffer build built builtin builtins busy but buy buyers bytearray bytecode bytes call
callable called calling calls came can cannot case cases castle cat cattle cause centre century
certain chairman change changes chapel character chars check chief child children choose chose
church city class classes clause clauses clean clear cliff climb cloth cls coast code cold come
comma command commands common compare complex computed condition contain contained container
contains contents context continue control convert converted copy copyright corner coroutine
count counter countless country course court cousin create created creates creating creation
crew crossed crowd current currently custom customers customize dark data daughter dawn day days
deal debug debugger debugging decimal decoded deep default defaults define defined defines
defining deleted depending depth derived described desk detail device different digit digits
dinner directly directory display distant division dock does dog done door down dream dress
drink drive during each early earn east easy eat edge either elder element elements else empty
enclosing encoding end enjoy entire entries env equal error errors escape evaluate evaluated
evaluates even evening event every exactly example examples except exception execute executed
executes execution exit expose eye face fair faith fall false famed familiar family famous far
farm fast father favourite feast feature feed few field fields file filename files fill finally
find fine fire first fish fixed flag flags fleet float floating flow flows folk follow followed
following follows foo food foot for forest form formal format formatted fort found founded four
frame free fresh friend friends from front fruit full function functions future garbage garden
gate gave generator generic gentle get girl give given glad global globals goes gold gone good
goods grand grandson grass great greedy green grew group grow guard guest half hall hand handle
handled handler handlers handling hands happy harbour hard has hash hashable have head hear
heard heart heavy held help here hierarchy high hill hills home honest horse hot hour house
houses how hundred husband ice identity immutable implement import important imported include
including index indicates inn input insert inside instance instances instead integer integers
intended interface interpret into invoked island item items iterable iteration iterator its
itself join journey joy just keep keeps kept key keys keyword keywords kind king kitchen knew
know known lady lake lambda lamp land lane language large largest last late latter laugh leading
leads learn least leave leaves left length less letter letters level library lie lies life light
like likely limit line lines link list listed listen lists literal literals little live lives
living loaded loader local location lock logger logging lonely long look lookup loop lord lost
love lovely low machine made make maker makes making manager many mapping mappings market
married master match matched matches matching max may meadow meal mean meaning means meet men
merchant message metaclass method methods middle mile miles mill mine mode modify module modules
monk month moon more morning most mostly mother mountain mouth moved multiple music must mutable
name named names namespace narrow near nearby neat need needed needs negative neighbour nested
never new newline news next night noble noise non nonlocal normal normally north northern not
note now number numbers numeric oak object objects occur occurs ocean often old older omitted
once one only open opened operand operation operator operators option optional orchard order
ordinary origin original other others otherwise out output outside over override own owner
package page paid pair pairs pale parameter parent parents park part party pass passed past path
pathname pattern patterns pay pdb peace people perhaps pid pier place plain plan plants platform
play plays pleasant plus point points poor popular port possible power preceded preceding
precision prefix present pretty price pride priest primary prince print priority prison process
produce profiling program proper property protocol proud provide provided provides public pull
pupil quay queen quick quiet quite rain raise raised raises raising range rather raw reach read
ready real recent recursion red refer reference reflected regular relative remaining removed
represent required rest result resulting results retrieved return returned returns rich ride
right rise road rock roof room root round row rule rules run running runs runtime said sail
sailor sails same sang saved school scope script sea search season seat second section see self
sell sells semantics send sent separated separator sequence sequences serve served session set
sets setting shape share shelter shine shop shore short should show side sign signal silent
silver similar simple simply since sing single sister sits size sky sleep slice slicing slope
slot slow small smile snow soft soil sold soldier some son song soon sound source south space
spec special specific specified specifies specify spent spring square stack stand standard
stands star start started starting statement static station status stay stderr stdin stdout
steep step still stone stood stop stored storm story strange stream street string strings strong
study style sub subclass subject substring such suite summer sun supper supplied support
supported supports sure sweet swim symbolic syntax system table take taken takes talk tall
target targets task taught teach temple tender test text than that the their them then there
these they thick thin third this those thousand thread three through tide time times top total
touch towards tower town traceback tracing track trade traders trailing train travel treated
tree trees trip true truncates trusted truth try tuples twelve twenty two type types typically
uncaught uncle under unique unless until usage use used useful user uses using usual usually
valid valley value values variable variables various version versions very via view village
visit voice wait walk wall walls want warm was wash watch watcher water wave way wealth wear
weather week well went were west what wheel when where whether which while white whole whose
wide width wife wild will wind window winter wise wish with within without woman women wonder
wood woods word work worked workers works world worth would year years yellow yet yield yields
you young your zero
""".split()
)
